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
        if norm.kind == "rmsnorm":
            return ops.rms_norm(x, norm.weight, norm.eps)
        if norm.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        normalized: torch.Tensor = self._plain.norm(x, norm)
        return normalized

    def logits(self, h: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
        if head.bias is None and ops.transposes(h):
            return ops.linear(h, head.weight)
        logits: torch.Tensor = self._plain.logits(h, head)
        return logits

    def loss(
        self, model: Any, x: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        h, head = model.hidden(x, **options), model.lm_head
        scored = targets != -100
        number = int(scored.sum())
        if 0 < number < targets.numel():  # a chat: the head is a large part of a small model
            h, targets = h[scored], targets[scored]
        if number and head.bias is None and cross_entropy.takes(h, head.weight):
            transposed = ops.transposes(h)
            return cross_entropy.linear_cross_entropy(h, head.weight, targets, total, transposed=transposed)
        return self._plain.cross_entropy(self.logits(h, head), targets, total)

    def _attention(self, w: BlockWeights, x: torch.Tensor, layer: int, context: Any) -> torch.Tensor:
        qkv = w.normalized_heads(_linear(self.norm(x, w.norm_attn), w, "qkv"))
        if torch.is_autocast_enabled("cpu"):
            # Attention stays float32 under bf16 autocast: SDPA's backward takes half the time on a CPU.
            with torch.autocast("cpu", enabled=False):
                y = self._attend(qkv.float(), w.heads, layer, context)
        else:
            y = self._attend(qkv, w.heads, layer, context)
        return _linear(y, w, "out")

    def _attend(self, qkv: torch.Tensor, heads: HeadSizes, layer: int, context: Any) -> torch.Tensor:
        if context.plain_causal and ops.attends(qkv, heads.D):
            return ops.attend(qkv, heads, *context.tables)
        return context.attend(qkv, heads, layer)

    def _mlp(self, w: BlockWeights, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x, w.norm_mlp)
        activation = ops.gelu if w.activation is F.gelu else w.activation
        if w.gate is None:
            return _linear(activation(_linear(x, w, "up")), w, "down")
        # One matmul for gate and up together is no faster on a CPU: at v1's widths and 8192 tokens forward and
        # backward take 1000 ms, separately 940 (bf16: 214 and 188).
        return _linear(activation(_linear(x, w, "gate")) * _linear(x, w, "up"), w, "down")


def _linear(x: torch.Tensor, w: BlockWeights, role: str) -> torch.Tensor:
    """x times a matrix of a block, with its adapter and its bias."""
    y, bias = ops.linear(x, getattr(w, role), w.adapters.get(role)), w.biases.get(role)
    return y if bias is None else y + bias.to(y.dtype)
