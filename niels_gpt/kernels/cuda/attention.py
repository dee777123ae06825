"""Causal attention with RoPE over windows of up to 256 tokens, for training on CUDA in bfloat16.

One kernel forward and one backward. At v0's size RoPE's passes over memory take as long as attention itself; here q and
k are rotated in registers, where they are used, and their gradients are rotated back there. Longer windows use cuDNN
(SDPA): its matmuls are better than Triton's, and they outweigh the passes over memory.
"""

from __future__ import annotations

from typing import Any

import torch

LONGEST = 256
"""Tokens of a window whose keys and values fit into one program."""
FEWEST = 256
"""Heads times rows, each one program. Fewer would leave a part of a large GPU idle, and were not measured."""
BLOCK = 64
"""Queries, and keys, per matmul."""


def usable(qkv: torch.Tensor, H: int) -> bool:
    """Whether `attend` takes the heads of qkv (B, n, 3 H D)."""
    B, n, wide = qkv.shape
    in_bf16 = qkv.is_cuda and qkv.dtype == torch.bfloat16
    return in_bf16 and n <= LONGEST and B * H >= FEWEST and wide // (3 * H) in (16, 32, 64)


@torch.library.custom_op("niels_gpt::short_attention", mutates_args=())
def _attend(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, lse)."""
    from niels_gpt.kernels.cuda import attention_triton as kernels

    B, n, _, H, D = qkv.shape
    qkv = qkv.contiguous()
    y, lse = qkv.new_empty((B, n, H, D)), qkv.new_empty((B, H, n), dtype=torch.float32)
    kernels.forward_kernel[(B * H,)](qkv, sin, cos, y, lse, n, H, D, BLOCK, num_warps=4)
    return y, lse


@_attend.register_fake
def _(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    B, n, _, H, D = qkv.shape
    return qkv.new_empty((B, n, H, D)), qkv.new_empty((B, H, n), dtype=torch.float32)


@torch.library.custom_op("niels_gpt::short_attention_backward", mutates_args=())
def _attend_backward(
    dy: torch.Tensor, qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, y: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    from niels_gpt.kernels.cuda import attention_triton as kernels

    B, n, _, H, D = qkv.shape
    dy, qkv = dy.contiguous(), qkv.contiguous()
    dqkv, deltas = torch.empty_like(qkv), torch.empty_like(lse)
    kernels.backward_kernel[(B * H,)](qkv, sin, cos, y, lse, dy, dqkv, deltas, n, H, D, BLOCK, num_warps=4)
    return dqkv


@_attend_backward.register_fake
def _(
    dy: torch.Tensor, qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, y: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradient(ctx: Any, dy: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return _attend_backward(dy, *ctx.saved_tensors), None, None


_attend.register_autograd(_gradient, setup_context=_save)


def attend(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Attention (B, n, H, D) of qkv (B, n, 3, H, D), q and k rotated by RoPE at positions 0..n-1.

    sin and cos (n, D/2) float32, contiguous.
    """
    return _attend(qkv, sin, cos)[0]
