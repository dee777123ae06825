"""The FP8 backend for training on CUDA (train.precision=fp8): the bf16 backend with its matmuls in FP8.

All matmuls of a block and of the head are FP8, forward and backward, except the weight gradient of the matrix after
attention, which is too small to gain by it. The four matrices of a block are quantized at once, when the block runs.
Only compiled runs gain: what torch computes is rounded to FP8 inside the kernel that the compiler generates for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from niels_gpt.kernels.cuda.backend import CUDABackend, causal_attention, norm_and_matrix
from niels_gpt.kernels.cuda.backend import unavailable as bf16_unavailable
from niels_gpt.kernels.fp8 import matmul, quantize
from niels_gpt.kernels.weights import BlockWeights

DECLINES = {
    "n_kv_heads": "RoPE and attention by plain torch; matmuls are FP8 if 16 divides (H + 2 n_kv_heads) D, else bf16",
    "qkv_bias": "everything in bf16",
    "bias": "blocks by plain torch; embedding, head and loss as without bias",
    "mlp=other": "everything in bf16, the activation by plain torch",
    "qk_norm": "everything in bf16",
    "segments": "RoPE by plain torch, attention by torch's varlen kernel; matmuls are FP8",
    "KV cache": "everything in bf16, as always without gradients",
}
"""Options it does not compute itself, and what happens instead."""


def unavailable(device: str) -> str:
    """Why this backend does not run on `device`, and the remedy; empty if it does."""
    reason = bf16_unavailable(device)
    if not reason and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has no FP8 matmuls (they came with Ada and Hopper): use train.precision=bf16"
    return reason


class FP8Backend(CUDABackend):
    """The bf16 backend with FP8 matmuls while gradients are recorded."""

    def branches(self, block: Any) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        w: BlockWeights = block.weights()
        declined = w.biases or w.biased or w.norm_q is not None or w.mlp == "other"
        if not self._in_fp8() or declined or w.qkv.shape[0] % 16:  # only grouped heads may have such a number of rows
            return super().branches(block)
        first = [w.up] if w.gate is None else [w.gate, w.up]
        qkv, out, up, down = quantize.matrices(
            [([w.qkv], w.norm_attn.weight), ([w.out], None), (first, w.norm_mlp.weight), ([w.down], None)]
        )
        return (
            functools.partial(self._attention_in_fp8, w, qkv, out),
            functools.partial(self._mlp_in_fp8, w, up, down),
        )

    def _in_fp8(self) -> bool:
        return torch.is_grad_enabled()

    def _attention_in_fp8(
        self,
        w: BlockWeights,
        qkv_fp8: quantize.Matrix,
        out_fp8: quantize.Matrix,
        x: torch.Tensor,
        layer: int,
        context: Any,
    ) -> torch.Tensor:
        x, weight = norm_and_matrix(x, w.norm_attn, w.qkv)
        if context.plain_causal and not w.heads.grouped:
            sin, cos = context.tables
            y = causal_attention(*matmul.heads(x, weight, qkv_fp8, sin, cos, w.heads.H))
        else:
            y = context.attend(matmul.linear(x, weight, qkv_fp8), w.heads, layer)
        return matmul.linear(y, w.out, out_fp8)

    def _mlp_in_fp8(
        self, w: BlockWeights, up_fp8: quantize.Matrix, down_fp8: quantize.Matrix, x: torch.Tensor
    ) -> torch.Tensor:
        first = w.up if w.gate is None else torch.cat((w.gate, w.up))
        x, weight = norm_and_matrix(x, w.norm_mlp, first)
        return matmul.mlp(x, weight, w.down, (up_fp8, down_fp8), gated=w.gate is not None)
