"""The CPU backend: norm, GELU, attention, loss and (without MKL) matmuls that torch computes slowly in training."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from niels_gpt.kernels.cpu import cross_entropy, native, ops
from niels_gpt.kernels.weights import BlockWeights, HeadSizes, NormWeights

DECLINES = {
    "segments": "attention by plain torch; the rest is accelerated",
    "KV cache": "attention by plain torch; the rest is accelerated",
}
"""Options it does not compute itself, and what happens instead."""


def missing_kernels() -> str:
    """Why the C kernels are not used, and the remedy; empty if they are. Without them the backend is only slower."""
    if os.environ.get(native.VARIABLE) == "0":
        reason = f"{native.VARIABLE}=0 switches the C kernels off: unset it"
    elif not native.allowed():
        reason = "C kernels are compiled on Linux only"
    else:
        native.library("gelu")  # compiles it, unless that is done
        reason = native.problem()
    return f"attention and GELU by torch, up to a fifth slower: {reason}" if reason else ""


class CPUBackend:
    """Accelerated forms for large training batches; what they decline goes to `plain`."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def embed(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def branches(self, block: Any) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        w = block.weights()
        return functools.partial(self._attention, w), functools.partial(self._mlp, w)

    def norm(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        if norm.rms:
            return ops.rms_norm(x, norm.weight, norm.eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, None, norm.eps)

    def logits(self, h: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
        return ops.linear(h, head.weight) if ops.transposes(h) else self._plain.logits(h, head)

    def loss(
        self, h: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor, total: torch.Tensor | None
    ) -> torch.Tensor:
        scored = targets != -100
        number = int(scored.sum())
        if 0 < number < targets.numel():  # a chat: the head is a large part of a small model
            h, targets = h[scored], targets[scored]
        if number and cross_entropy.takes(h, head.weight):
            transposed = ops.transposes(h)
            return cross_entropy.linear_cross_entropy(h, head.weight, targets, total, transposed=transposed)
        return self._plain.cross_entropy(self.logits(h, head), targets, total)

    def _attention(self, w: BlockWeights, x: torch.Tensor, layer: int, context: Any) -> torch.Tensor:
        qkv = ops.linear(self.norm(x, w.norm_attn), w.qkv, w.adapters.get("qkv"))
        if w.qkv_bias is not None:
            qkv = qkv + w.qkv_bias
        qkv = w.normalized_heads(qkv)
        if torch.is_autocast_enabled("cpu"):
            # Attention stays float32 under bf16 autocast: SDPA's backward takes half the time on a CPU.
            with torch.autocast("cpu", enabled=False):
                y = self._attend(qkv.float(), w.heads, layer, context)
        else:
            y = self._attend(qkv, w.heads, layer, context)
        return ops.linear(y, w.out, w.adapters.get("out"))

    def _attend(self, qkv: torch.Tensor, heads: HeadSizes, layer: int, context: Any) -> torch.Tensor:
        if context.plain_causal and ops.attends(qkv, heads.D):
            return ops.attend(qkv, heads, *context.tables)
        return context.attend(qkv, heads, layer)

    def _mlp(self, w: BlockWeights, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x, w.norm_mlp)
        gate, up, down = (w.adapters.get(role) for role in ("gate", "up", "down"))
        if w.gate is None:
            return ops.linear(ops.gelu(ops.linear(x, w.up, up)), w.down, down)
        # One matmul for gate and up together is no faster on a CPU: at v1's widths and 8192 tokens forward and
        # backward take 1000 ms, separately 940 (bf16: 214 and 188).
        return ops.linear(F.silu(ops.linear(x, w.gate, gate)) * ops.linear(x, w.up, up), w.down, down)
