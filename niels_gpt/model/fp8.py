"""Products in FP8, for training on CUDA where the hardware has them (Hopper, Ada and later): train.precision=fp8.

A product forward, and the one for the gradient of what went in, take both matrices as float8_e4m3fn (three bits of
mantissa, up to 448) with a float32 scale for each row of activations and one for a matrix of weights, chosen anew every
time from its largest element: no history, so a resumed run computes the same. Where the range is known before (of what
a norm made, and of the head's way back, in `fused.py`), or who reads a product multiplies by the scales (the
activation's way back), one scale does for all rows, and the product is up to a fifth faster. The gradient of a weight,
summed over all tokens, stays a product of bfloat16. All matrices of a block are rounded together, as they are and
turned (`matrices`): one by one they would take 18 small kernels. What an operator of ours makes just before (an
activation, RoPE's way back), it writes in FP8 right away; what torch makes is rounded in the kernel that the compiler
makes of it, so this pays only in compiled runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from niels_gpt.model import fused
from niels_gpt.model.in_fp8 import Matrix, Rows, after_norm, rows

_wanted = False


@contextlib.contextmanager
def products(wanted: bool) -> Iterator[None]:
    """Whether training computes in FP8, for the block; evaluation never does."""
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def on(x: torch.Tensor) -> bool:
    """Whether products with x are to be FP8."""
    return _wanted and torch.is_grad_enabled() and fused.in_bf16(x)


def _times(a: Rows, b: Rows) -> torch.Tensor:
    """a b^T in bfloat16, for a (M, K) and b (N, K), both with a scale per row or both with one."""
    scales = a[1], b[1] if b[1].dim() == 0 else b[1].t()
    return torch._scaled_mm(a[0], b[0].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _gradient_of_weight(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (g.t() @ x).to(torch.float32)


# The functions below take a weight for its gradient alone: what they compute with is its Matrix.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *matrix: torch.Tensor) -> torch.Tensor:
        eighth, turned, _, by_row, by_column = matrix
        ctx.save_for_backward(x, turned, by_column)
        return _times(rows(x), (eighth, by_row))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, turned, by_column = ctx.saved_tensors
        return _times(rows(g), (turned, by_column)), _gradient_of_weight(g, x), *[None] * 5


def product(x: torch.Tensor, weight: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """x weight^T in bfloat16, for x (..., K) of any type and weight (N, K), K and N multiples of 16."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _Product.apply(flat, weight, *matrix).view(*x.shape[:-1], -1)


# --- heads -----------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::turned_heads_backward_fp8", mutates_args=())
def _turn_back(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor | None, cos: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, n, H, D = dq.shape
    eighth, scales = _empty(dq, B * n, 3 * H * D)
    dqkv = fused.turn_back(dq, dk, dv, sin, cos, eighth, scales)
    return dqkv.view(B * n, 3 * H * D), eighth, scales


@_turn_back.register_fake
def _(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor | None, cos: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    B, n, H, D = dq.shape
    return dq.new_empty((B * n, 3 * H * D)), *_empty(dq, B * n, 3 * H * D)


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
        eighth, turned, one, _, by_column = matrix
        ctx.save_for_backward(x, turned, by_column, sin, cos)
        qkv = _times(after_norm(x), (eighth, one)).view(len(x) // n, n, 3, H, -1)
        if sin is None or cos is None:
            return qkv.unbind(2)
        return *fused.turned_pair(qkv, sin, cos), qkv[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, turned, by_column, sin, cos = ctx.saved_tensors
        g, *eighth = _turn_back(*gradients, sin, cos)
        dx = _times((eighth[0], eighth[1]), (turned, by_column))
        return dx, _gradient_of_weight(g, x), *[None] * 9


def heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    matrix: Matrix,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    H: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (B, n, H, D) of the product of x (B, n, C), which a norm made (`after_norm`), and weight (3 C, C); with
    sin and cos, turned by RoPE (`fused.turned_heads`)."""
    n, C = x.shape[1:]
    return _Heads.apply(x.to(torch.bfloat16).reshape(-1, C), weight, sin, cos, n, H, *matrix)


# --- MLP -------------------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::activation_fp8", mutates_args=())
def _activate(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    eighth, scales = _empty(u, len(u), u.shape[1] // (2 if gated else 1))
    return fused.activate(u, gated, eighth, scales), eighth, scales


@_activate.register_fake
def _(u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    shape = len(u), u.shape[1] // (2 if gated else 1)
    return u.new_empty(shape), *_empty(u, *shape)


@torch.library.custom_op("niels_gpt::activation_backward_fp8", mutates_args=())
def _activate_back(
    dy: torch.Tensor, factors: torch.Tensor, u: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    eighth, scales = _empty(u, *u.shape)
    return fused.activate_back(dy, u, gated, factors, eighth, scales), eighth, scales


@_activate_back.register_fake
def _(dy: torch.Tensor, factors: torch.Tensor, u: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(u), *_empty(u, *u.shape)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, gated: bool, *both: torch.Tensor
    ) -> torch.Tensor:
        eighth, turned, one, _, by_column, eighth_out, turned_out, one_out, by_row_out, _ = both
        u = _times(after_norm(x), (eighth, one))
        y, *made = _activate(u, gated)
        ctx.save_for_backward(x, u, y, turned, by_column, turned_out, one_out)
        ctx.gated = gated
        return _times((made[0], made[1]), (eighth_out, by_row_out))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, u, y, turned, by_column, turned_out, one_out = ctx.saved_tensors
        eighth, scales = rows(g)
        # the scales of the rows are left to who reads it
        dy = _times((eighth, torch.ones((), device=g.device)), (turned_out, one_out))
        du, *made = _activate_back(dy, scales, u, ctx.gated)
        dx = _times((made[0], made[1]), (turned, by_column))
        return dx, _gradient_of_weight(du, x), _gradient_of_weight(g, y), *[None] * 11


def mlp(
    x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, matrices: tuple[Matrix, Matrix], *, gated: bool
) -> torch.Tensor:
    """activation(x into^T) out^T (`fused.activation`) in bfloat16, for x (..., C), which a norm made (`after_norm`)."""
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return _MLP.apply(flat, into, out, gated, *matrices[0], *matrices[1]).view(*x.shape[:-1], -1)
