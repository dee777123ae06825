"""Fused operators for training on CUDA in bfloat16: heads with RoPE, GELU, SwiGLU.

They are `torch.library` operators: autograd, torch.compile and CUDA graphs treat them like torch's own. The tests
compare them with plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

# --- heads -----------------------------------------------------------------------------------------


def _sizes(H: int, D: int) -> dict[str, int]:
    return {"HEADS": 1 << (H - 1).bit_length(), "WIDTH": 1 << (D - 1).bit_length()}


@torch.library.custom_op("niels_gpt::rotated_heads", mutates_args=())
def _rotated_heads(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, H: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from niels_gpt.kernels.cuda import ops_triton

    B, n, all_heads, D = qkv.shape
    q, k, v = _empty_heads(qkv, H)
    numbers = n, H, (all_heads - H) // 2, D
    ops_triton.rope_kernel[(B * n,)](qkv, q, k, v, sin, cos, *numbers, **_sizes(H, D), VALUES=True, num_warps=2)
    return q, k, v


def _empty_heads(qkv: torch.Tensor, H: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, n, all_heads, D = qkv.shape
    G = (all_heads - H) // 2
    return qkv.new_empty((B, n, H, D)), qkv.new_empty((B, n, G, D)), qkv.new_empty((B, n, G, D))


@_rotated_heads.register_fake
def _(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, H: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_heads(qkv, H)


@torch.library.custom_op("niels_gpt::rotated_queries_and_keys", mutates_args=())
def rotated_queries_and_keys(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (B, n, H, D) of qkv (B, n, 3, H, D), rotated, without autograd: for callers that read v from qkv."""
    from niels_gpt.kernels.cuda import ops_triton

    B, n, _, H, D = qkv.shape
    q, k = qkv.new_empty((B, n, H, D)), qkv.new_empty((B, n, H, D))
    ops_triton.rope_kernel[(B * n,)](qkv, q, k, k, sin, cos, n, H, H, D, **_sizes(H, D), VALUES=False, num_warps=2)
    return q, k


@rotated_queries_and_keys.register_fake
def _(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, ...]:
    B, n, _, H, D = qkv.shape
    return qkv.new_empty((B, n, H, D)), qkv.new_empty((B, n, H, D))


@torch.library.custom_op("niels_gpt::rotated_heads_backward", mutates_args=())
def _rotated_heads_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> torch.Tensor:
    return rotate_back(dq, dk, dv, sin, cos, _empty_qkv(dq, dk))


def _empty_qkv(dq: torch.Tensor, dk: torch.Tensor) -> torch.Tensor:
    B, n, H, D = dq.shape
    return dq.new_empty((B, n, H + 2 * dk.shape[2], D))


def rotate_back(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    dqkv: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradient of the input of `rotated_heads` into dqkv; with scales, in FP8 with a scale per token.

    Without sin and cos nothing is rotated, only concatenated.
    """
    from niels_gpt.kernels.cuda import ops_triton

    (B, n, H, D), G = dq.shape, dk.shape[2]
    gradients = [g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv)]
    strides = [stride for g in gradients for stride in g.stride()[:3]]
    ops_triton.rope_backward_kernel[(B * n,)](
        *gradients, dqkv, scales, sin, cos, n, H, G, D, *strides,
        **_sizes(H, D), ROPE=sin is not None, FP8=scales is not None, num_warps=2,
    )  # fmt: skip
    return dqkv


@_rotated_heads_backward.register_fake
def _(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return _empty_qkv(dq, dk)


def _save_tables(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _rotate_back(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _rotated_heads_backward(*gradients, *ctx.saved_tensors), None, None, None


_rotated_heads.register_autograd(_rotate_back, setup_context=_save_tables)


def rotated_heads(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, H: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (B, n, H, D), k and v (B, n, G, D) of qkv (B, n, H + 2 G, D); q and k rotated by RoPE at positions 0..n-1.

    sin and cos (n, D/2) float32, contiguous.
    """
    return _rotated_heads(qkv, sin, cos, H)


# --- activations -----------------------------------------------------------------------------------


def _block(F: int, gated: bool) -> int:
    """Elements of a row per program."""
    return min(1 << (F - 1).bit_length(), 2048 if gated else 1024)


@torch.library.custom_op("niels_gpt::activation", mutates_args=())
def activation(x: torch.Tensor, gated: bool) -> torch.Tensor:
    """The exact GELU x Phi(x); gated: silu(gate) up, for x (..., 2 F) = gate and up, concatenated."""
    from niels_gpt.kernels.cuda import ops_triton

    x = x.contiguous()
    F = x.shape[-1] // (2 if gated else 1)
    y, block = x.new_empty((*x.shape[:-1], F)), _block(F, gated)
    ops_triton.activation_kernel[(y.numel() // F, -(-F // block))](x, y, F, BLOCK=block, GATED=gated, num_warps=4)
    return y


@torch.library.custom_op("niels_gpt::activation_backward", mutates_args=())
def _activation_backward(dy: torch.Tensor, x: torch.Tensor, gated: bool) -> torch.Tensor:
    from niels_gpt.kernels.cuda import ops_triton

    dy, x = dy.contiguous(), x.contiguous()
    F, dx = dy.shape[-1], torch.empty_like(x)
    block = _block(F, gated)
    ops_triton.activation_backward_kernel[(dy.numel() // F, -(-F // block))](
        dy, x, dx, F, BLOCK=block, GATED=gated, num_warps=4
    )
    return dx


def _save_input(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.gated = inputs[1]


def _activation_gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _activation_backward(dy, ctx.saved_tensors[0], ctx.gated), None


activation.register_fake(lambda x, gated: x.new_empty((*x.shape[:-1], x.shape[-1] // (2 if gated else 1))))
_activation_backward.register_fake(lambda dy, x, gated: torch.empty_like(x, memory_format=torch.contiguous_format))
activation.register_autograd(_activation_gradient, setup_context=_save_input)
