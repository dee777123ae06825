"""FP8 matmuls with their gradients: a linear layer, the heads of attention, an MLP.

For train.precision=fp8 on GPUs that have them (Ada, Hopper and later). Scales (`quantize.py`) are per row of
activations. Where the range is known before (the result of a norm; the gradient of the head, `cuda/cross_entropy.py`),
or the consumer of a matmul multiplies by the scales (the activation's backward), one scale serves all rows, and the
matmul is up to a fifth faster.

The gradient of a weight is a sum over all tokens, g^T x, for which the hardware needs both operands transposed, each
with one scale (`quantize.weight_gradient`). Our own kernels (activations and their backward, RoPE's backward) write FP8
directly, transposed where they can. The absolute maximum of an activation's gradient is not known before all of it is
computed, but a bound is: |g| |w| times the activation's steepest slope. A floating-point scale that is four powers of
two too large loses no bits, so one kernel computes that gradient in both layouts in one pass, and recomputes the
activations, which need not be stored.
"""

from __future__ import annotations

from typing import Any

import torch

from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.kernels.fp8.quantize import (
    Matrix,
    Rows,
    empty_transposed,
    float32_matmul,
    normed_rows,
    power_of_two_scale,
    rows,
    transposed,
    weight_gradient,
)


def _matmul(a: Rows, b: Rows) -> torch.Tensor:
    """a b^T in bfloat16, for a (M, K) and b (N, K), both with a scale per row or both with one scale."""
    scales = a[1], b[1] if b[1].dim() == 0 else b[1].t()
    return torch._scaled_mm(a[0], b[0].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


# The functions below take a weight only to give it a gradient: they compute with its quantized Matrix.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *matrix: torch.Tensor) -> torch.Tensor:
        quantized, matrix_t, _, row_scales, column_scales = matrix
        ctx.save_for_backward(x, matrix_t, column_scales)
        return _matmul(rows(x), (quantized, row_scales))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, matrix_t, column_scales = ctx.saved_tensors
        return _matmul(rows(g), (matrix_t, column_scales)), (g.t() @ x).to(torch.float32), *[None] * 5


def linear(x: torch.Tensor, weight: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """x weight^T in bfloat16, for x (..., K) of any dtype and weight (N, K), K and N multiples of 16."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _Linear.apply(flat, weight, *matrix).view(*x.shape[:-1], -1)


# --- heads -----------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::rotated_heads_backward_fp8", mutates_args=())
def _gradient_of_qkv(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor | None, cos: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales = _empty(dq, dq.shape[0] * dq.shape[1], 3 * dq.shape[2] * dq.shape[3])
    cuda_ops.rotate_back(dq, dk, dv, sin, cos, quantized, scales)
    return quantized, scales


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
        quantized, matrix_t, one, _, column_scales = matrix
        x8 = normed_rows(x)
        ctx.save_for_backward(*x8, matrix_t, column_scales, sin, cos)
        qkv = _matmul(x8, (quantized, one)).view(len(x) // n, n, 3, H, -1)
        if sin is None or cos is None:
            return qkv.unbind(2)
        return *cuda_ops.rotated_queries_and_keys(qkv, sin, cos), qkv[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, matrix_t, column_scales, sin, cos = ctx.saved_tensors
        g, scales = _gradient_of_qkv(*gradients, sin, cos)
        return _matmul((g, scales), (matrix_t, column_scales)), weight_gradient(g, x, scales, x_scale), *[None] * 9


def heads(
    x: torch.Tensor, weight: torch.Tensor, matrix: Matrix, sin: torch.Tensor | None, cos: torch.Tensor | None, H: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (B, n, H, D) of x weight^T, for x (B, n, C) from a norm (`normed_rows`) and weight (3 C, C).

    With sin and cos (n, D/2), q and k are rotated by RoPE.
    """
    n, C = x.shape[1:]
    return _Heads.apply(x.to(torch.bfloat16).reshape(-1, C), weight, sin, cos, n, H, *matrix)


# --- MLP -------------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::activation_fp8", mutates_args=())
def _activation(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(activations of u in FP8, their scales (M, 1), bounds (M, 1) on |gradient of u| / |gradient of activations|)."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    u = u.contiguous()
    M, F = len(u), u.shape[1] // (2 if gated else 1)
    quantized, scales = _empty(u, M, F)
    bounds = torch.empty_like(scales)
    piece = min(1 << (F - 1).bit_length(), 2048 if gated else 512)
    fp8_kernels.activation_kernel[(M,)](
        u, quantized, scales, bounds, F, PIECE=piece, PIECES=-(-F // piece), GATED=gated, num_warps=4 if gated else 2
    )
    return quantized, scales, bounds


@_activation.register_fake
def _(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    quantized, scales = _empty(u, len(u), u.shape[1] // (2 if gated else 1))
    return quantized, scales, torch.empty_like(scales)


@torch.library.custom_op("niels_gpt::activation_backward_fp8", mutates_args=())
def _activation_backward(
    dy: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, shares: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of u, rows times factors; its transpose; the transposed activations, rows times shares), in FP8."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    M, F = dy.shape
    quantized, matrix_t, again = _empty_backward(dy, u)
    words = again.shape[1] // 4
    fp8_kernels.activation_backward_kernel[(-(-F // 64), -(-words // 16))](
        dy, u, quantized, matrix_t.view(torch.int32), again.view(torch.int32), factors, shares, M, words, F,
        WORDS=16, LANES=64, GATED=gated, num_warps=4,
    )  # fmt: skip
    return quantized, matrix_t, again


@_activation_backward.register_fake
def _(
    dy: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, shares: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, ...]:
    return _empty_backward(dy, u)


def _empty_backward(dy: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quantized = torch.empty_like(u, dtype=torch.float8_e4m3fn)
    return quantized, empty_transposed(quantized), empty_transposed(quantized, dy.shape[1])


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, gated: bool, *both: torch.Tensor
    ) -> torch.Tensor:
        quantized, matrix_t, one, _, column_scales, matrix_out, transposed_out, scale_out, row_scales_out, _ = both
        x8 = normed_rows(x)
        u = _matmul(x8, (quantized, one))
        y, scales, bounds = _activation(u, gated)
        ctx.save_for_backward(*x8, u, scales, bounds, matrix_t, column_scales, transposed_out, scale_out)
        ctx.gated = gated
        return _matmul((y, scales), (matrix_out, row_scales_out))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, u, y_scales, bounds, matrix_t, column_scales, transposed_out, scale_out = ctx.saved_tensors
        quantized, scales = rows(g)
        # A dot product of vectors of lengths a and b is at most a b: the range of du is known before it is computed.
        longest = transposed_out.float().square().sum(1).amax().sqrt() * scale_out
        du_scales = power_of_two_scale(g.float().square().sum(1, keepdim=True).sqrt() * longest * bounds)
        unit, one = (scales * y_scales).amax(), torch.ones((), device=g.device)
        dy = _matmul((quantized, one), (transposed_out, scale_out))  # `scales` is multiplied in by the next kernel
        du, du_transposed, y_transposed = _activation_backward(dy, u, scales / du_scales, scales / unit, ctx.gated)
        return (
            _matmul((du, du_scales), (matrix_t, column_scales)),
            weight_gradient(du, x, du_scales, x_scale, a_transposed=du_transposed),
            float32_matmul((transposed(quantized), one), (y_transposed, unit)),
            *[None] * 11,
        )


def mlp(
    x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, matrices: tuple[Matrix, Matrix], *, gated: bool
) -> torch.Tensor:
    """activation(x into^T) out^T in bfloat16, for x (..., C) from a norm (`normed_rows`); see `cuda.ops.activation`."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _MLP.apply(flat, into, out, gated, *matrices[0], *matrices[1]).view(*x.shape[:-1], -1)
