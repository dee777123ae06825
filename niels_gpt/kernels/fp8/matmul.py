"""Products in FP8, for training on CUDA where the hardware has them (Hopper, Ada and later): train.precision=fp8.

All products of a block and of the head are FP8, there and back, but for the gradient of the matrix after attention,
which is too small to gain by it. Numbers and their scales: `in_fp8.py`. Scales are chosen anew every time: no history,
so a resumed run computes the same. Where the range is known before (of what a norm made, and of the head's way back, in
`fused.py`), or who reads a product multiplies by the scales (the activation's way back), one scale does for all rows,
and the product is up to a fifth faster.

The gradient of a weight is a sum over all tokens, g^T x. There the hardware wants both sides turned, each with one
scale. So what has a scale by row hands it over to the other side; and what our own kernels make (an activation and its
way back, RoPE's way back) they write in FP8 right away, and turned where they can. What torch makes is rounded in the
kernel that the compiler makes of it, so this pays only in compiled runs.
"""

from __future__ import annotations

from typing import Any

import torch

from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.kernels.fp8.quantize import (
    Matrix,
    Rows,
    after_norm,
    empty_turned,
    over_tokens,
    power,
    rows,
    summed,
    turned,
)


def _times(a: Rows, b: Rows) -> torch.Tensor:
    """a b^T in bfloat16, for a (M, K) and b (N, K), both with a scale per row or both with one."""
    scales = a[1], b[1] if b[1].dim() == 0 else b[1].t()
    return torch._scaled_mm(a[0], b[0].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


# The functions below take a weight for its gradient alone: what they compute with is its Matrix.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *matrix: torch.Tensor) -> torch.Tensor:
        eighth, across, _, by_row, by_column = matrix
        ctx.save_for_backward(x, across, by_column)
        return _times(rows(x), (eighth, by_row))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, across, by_column = ctx.saved_tensors
        return _times(rows(g), (across, by_column)), (g.t() @ x).to(torch.float32), *[None] * 5


def linear(x: torch.Tensor, weight: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """x weight^T in bfloat16, for x (..., K) of any type and weight (N, K), K and N multiples of 16."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _Linear.apply(flat, weight, *matrix).view(*x.shape[:-1], -1)


# --- heads -----------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::rotated_heads_backward_fp8", mutates_args=())
def _gradient_of_qkv(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor | None, cos: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    eighth, scales = _empty(dq, dq.shape[0] * dq.shape[1], 3 * dq.shape[2] * dq.shape[3])
    cuda_ops.rotate_back(dq, dk, dv, sin, cos, eighth, scales)
    return eighth, scales


@_gradient_of_qkv.register_fake
def _(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor | None, cos: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    return _empty(dq, dq.shape[0] * dq.shape[1], 3 * dq.shape[2] * dq.shape[3])


def _empty(like: torch.Tensor, M: int, K: int) -> Rows:
    return like.new_empty((M, K), dtype=torch.float8_e4m3fn), like.new_empty((M, 1), dtype=torch.float32)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        sin: torch.Tensor | None,
        cos: torch.Tensor | None,
        n: int,
        H: int,
        *matrix: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        eighth, across, one, _, by_column = matrix
        given = after_norm(x)
        ctx.save_for_backward(*given, across, by_column, sin, cos)
        qkv = _times(given, (eighth, one)).view(len(x) // n, n, 3, H, -1)
        if sin is None or cos is None:
            return qkv.unbind(2)
        return *cuda_ops.rotated_queries_and_keys(qkv, sin, cos), qkv[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, across, by_column, sin, cos = ctx.saved_tensors
        g, scales = _gradient_of_qkv(*gradients, sin, cos)
        return _times((g, scales), (across, by_column)), over_tokens(g, x, scales, x_scale), *[None] * 9


def heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    matrix: Matrix,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    H: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (B, n, H, D) of the product of x (B, n, C), which a norm made (`after_norm`), and weight (3 C, C); with
    sin and cos, turned by RoPE (`cuda.ops.rotated_heads`)."""
    n, C = x.shape[1:]
    return _Heads.apply(x.to(torch.bfloat16).reshape(-1, C), weight, sin, cos, n, H, *matrix)


# --- MLP -------------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::activation_fp8", mutates_args=())
def _activate(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations of u with scales, and how much larger the gradient of u can be than theirs: (M, 1)."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    u = u.contiguous()
    M, F = len(u), u.shape[1] // (2 if gated else 1)
    eighth, scales = _empty(u, M, F)
    reaches = torch.empty_like(scales)
    piece = min(1 << (F - 1).bit_length(), 2048 if gated else 512)
    fp8_kernels.activate_kernel[(M,)](
        u, eighth, scales, reaches, F, PIECE=piece, PIECES=-(-F // piece), GATED=gated, num_warps=4 if gated else 2
    )
    return eighth, scales, reaches


@_activate.register_fake
def _(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    eighth, scales = _empty(u, len(u), u.shape[1] // (2 if gated else 1))
    return eighth, scales, torch.empty_like(scales)


@torch.library.custom_op("niels_gpt::activation_backward_fp8", mutates_args=())
def _activate_back(
    dy: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, shares: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of u, rows times factors, as it is and turned; and the activations, rows times shares, turned."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    M, F = dy.shape
    eighth, across, again = _empty_back(dy, u)
    words = again.shape[1] // 4
    fp8_kernels.activate_back_kernel[(-(-F // 64), -(-words // 16))](
        dy, u, eighth, across.view(torch.int32), again.view(torch.int32), factors, shares, M, words, F,
        WORDS=16, LANES=64, GATED=gated, num_warps=4,
    )  # fmt: skip
    return eighth, across, again


@_activate_back.register_fake
def _(
    dy: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, shares: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, ...]:
    return _empty_back(dy, u)


def _empty_back(dy: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    eighth = torch.empty_like(u, dtype=torch.float8_e4m3fn)
    return eighth, empty_turned(eighth), empty_turned(eighth, dy.shape[1])


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, gated: bool, *both: torch.Tensor
    ) -> torch.Tensor:
        eighth, across, one, _, by_column, eighth_out, across_out, one_out, by_row_out, _ = both
        given = after_norm(x)
        u = _times(given, (eighth, one))
        y, scales, reaches = _activate(u, gated)
        ctx.save_for_backward(*given, u, scales, reaches, across, by_column, across_out, one_out)
        ctx.gated = gated
        return _times((y, scales), (eighth_out, by_row_out))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, u, y_scales, reaches, across, by_column, across_out, one_out = ctx.saved_tensors
        eighth, scales = rows(g)
        # No product of rows of lengths a and b is larger than a b: so the range of du is known before it is made.
        longest = across_out.float().square().sum(1).amax().sqrt() * one_out
        du_scales = power(g.float().square().sum(1, keepdim=True).sqrt() * longest * reaches)
        unit, one = (scales * y_scales).amax(), torch.ones((), device=g.device)
        dy = _times((eighth, one), (across_out, one_out))  # still to be times `scales`
        du, du_turned, y_turned = _activate_back(dy, u, scales / du_scales, scales / unit, ctx.gated)
        return (
            _times((du, du_scales), (across, by_column)),
            over_tokens(du, x, du_scales, x_scale, a_turned=du_turned),
            summed((turned(eighth), one), (y_turned, unit)),
            *[None] * 11,
        )


def mlp(
    x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, matrices: tuple[Matrix, Matrix], *, gated: bool
) -> torch.Tensor:
    """activation(x into^T) out^T (`fused.activation`) in bfloat16, for x (..., C), which a norm made (`after_norm`)."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _MLP.apply(flat, into, out, gated, *matrices[0], *matrices[1]).view(*x.shape[:-1], -1)
