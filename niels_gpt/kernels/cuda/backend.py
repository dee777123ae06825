"""The CUDA backend for bf16 autocast: fused RoPE, attention over short windows, activations and cross-entropy.

The residual stream is bfloat16: half the memory traffic between the matmuls. The weight of a norm is multiplied into
the matrix that follows, not into the activations: its gradient then comes from the gradient of the matrix, and not from
another pass over all activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from niels_gpt.kernels import lora
from niels_gpt.kernels.cuda import attention, cross_entropy, ops
from niels_gpt.kernels.weights import BlockWeights, HeadSizes, NormWeights
from niels_gpt.system.device import HAS_TRITON

DECLINES = {
    "positions=learned": "attention by torch's SDPA; the rest is fused",
    "bias": "blocks by plain torch; embedding, head and loss are fused",
    "mlp=other": "the activation by plain torch; the rest is fused",
    "segments": "RoPE by plain torch, attention by torch's varlen kernel; the rest is fused",
    "KV cache": "RoPE and attention by plain torch; the rest is fused",
}
"""Options it does not compute itself, and what happens instead."""


def unavailable(device: str) -> str:
    """Why this backend does not run on `device`, and the remedy; empty if it does."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "needs an NVIDIA GPU and torch for CUDA: use --device cuda on a machine that has one"
    if not HAS_TRITON:
        return "needs Triton, which torch for CUDA includes on Linux: pip install triton"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        return f"{name} is older than Ampere, whose bfloat16 and tf32 these kernels use: use train.precision=fp32"
    return ""


def norm_and_matrix(x: torch.Tensor, norm: NormWeights, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x normalized without the norm's weight, the matrix times that weight), to be multiplied."""
    normalize = F.rms_norm if norm.kind == "rmsnorm" else F.layer_norm
    return normalize(x.float(), x.shape[-1:], eps=norm.eps), weight * norm.weight


def _norm_and_linear(
    x: torch.Tensor, norm: NormWeights, weight: torch.Tensor, adapter: lora.Adapter | None
) -> torch.Tensor:
    """The norm of x times a matrix with its adapter."""
    x, weight = norm_and_matrix(x, norm, weight)
    return lora.linear(x, weight, None if adapter is None else adapter.with_inputs_scaled(norm.weight))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA of queries (B, n, H, D), keys and values (B, n, G, D), concatenated (B, n, H D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if k.shape[1] < q.shape[1]:  # with copies cuDNN's kernel is used, which is faster than the one for grouped heads
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)


class CUDABackend:
    """Fused operations under bf16 autocast; what they decline goes to `plain`."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def embed(self, h: torch.Tensor) -> torch.Tensor:
        return h.to(torch.bfloat16)

    def branches(self, block: Any) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        w: BlockWeights = block.weights()
        if w.biased:
            plain: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = self._plain.branches(block)
            return plain
        return functools.partial(self._attention, w), functools.partial(self._mlp, w)

    def norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        if norm.kind == "rmsnorm":  # autocast computes layer_norm in float32, but not rms_norm
            return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def logits(self, h: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
        return self._plain.logits(h, head)

    def loss(
        self, model: Any, x: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Cross-entropy without all logits in memory at once."""
        h, head = model.hidden(x, **options), model.lm_head
        if head.bias is not None:
            plain: torch.Tensor = self._plain.cross_entropy(head(h), targets, total)
            return plain
        y = targets.flatten()
        total = (y >= 0).sum() if total is None else total
        flat = h.to(torch.bfloat16).flatten(0, 1)
        return cross_entropy.linear_cross_entropy(flat, head.weight, y, total, fp8=self._in_fp8())

    def _in_fp8(self) -> bool:
        """Whether matmuls are FP8 now."""
        return False

    def _attention(self, w: BlockWeights, x: torch.Tensor, layer: int, context: Any) -> torch.Tensor:
        qkv = _norm_and_linear(x, w.norm_attn, w.qkv, w.adapters.get("qkv"))
        if "qkv" in w.biases:
            qkv = qkv + w.biases["qkv"].to(qkv.dtype)
        y = self._attend(w.normalized_heads(qkv), w.heads, layer, context)
        return lora.linear(y, w.out, w.adapters.get("out"))

    def _attend(self, qkv: torch.Tensor, heads: HeadSizes, layer: int, context: Any) -> torch.Tensor:
        if context.plain_causal and context.rope is not None:
            B, n, _ = qkv.shape
            if not heads.grouped and attention.usable(qkv, heads.H):
                return attention.attend(qkv.view(B, n, 3, heads.H, heads.D), *context.tables).flatten(2)
            sin, cos = context.tables
            return causal_attention(*ops.rotated_heads(qkv.view(B, n, -1, heads.D), sin, cos, heads.H))
        return context.attend(qkv, heads, layer)

    def _mlp(self, w: BlockWeights, x: torch.Tensor) -> torch.Tensor:
        first, adapter = w.up, w.adapters.get("up")
        if w.gate is not None:  # one matmul for both
            adapter = lora.stack(w.gate, w.up, (w.adapters.get("gate"), adapter))
            first = torch.cat((w.gate, w.up))
        u = _norm_and_linear(x, w.norm_mlp, first, adapter)
        if w.mlp != "other":
            u = ops.activation(u, gated=w.gate is not None)
        elif w.gate is None:
            u = w.activation(u)
        else:
            gate, up = u.chunk(2, dim=-1)
            u = w.activation(gate) * up
        return lora.linear(u, w.down, w.adapters.get("down"))
