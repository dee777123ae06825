"""Numbers in FP8: rows of activations, matrices of weights, each with the scale that it must be multiplied by again.

float8_e4m3fn has three bits of mantissa and ends at 448. Scales come from the largest element, or from what it can be
at most, and are chosen anew every time. Those of rows are powers of two: a row can then be given another scale
(`turned`) without being rounded once more.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from niels_gpt.system.device import HAS_TRITON

LARGEST = 448.0
"""Where float8_e4m3fn ends."""

Rows = tuple[torch.Tensor, torch.Tensor]
"""(M, K) in FP8, and its scale: () or, by row, (M, 1)."""

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""A matrix (N, K) in FP8, the same turned (K, N), and the one scale of both: (), (N, 1) and (K, 1)."""


def power(top: torch.Tensor) -> torch.Tensor:
    """The scale, a power of two, with which what is `top` at most ends at 448 at most."""
    bits = (top.float().clamp(min=1e-30) / LARGEST).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # up to the next exponent


def rows(x: torch.Tensor) -> Rows:
    """x (M, K) in FP8, with a scale for each row."""
    if HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling():
        return _rows_at_once(x)
    scale = power(x.abs().amax(-1, keepdim=True))
    return (x * (1 / scale)).to(torch.float8_e4m3fn), scale


def _rows_at_once(x: torch.Tensor) -> Rows:
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    x = x.contiguous()
    (M, K), block = x.shape, 1 << (x.shape[1] - 1).bit_length()
    eighth, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((M, 1), dtype=torch.float32)
    fp8_kernels.rows_kernel[(M,)](x, eighth, scales, K, BLOCK=block, num_warps=min(max(block // 512, 1), 16))
    return eighth, scales


def after_norm(x: torch.Tensor) -> Rows:
    """x (M, K), which a norm made and nothing was multiplied to, with one scale: |x| <= sqrt(K)."""
    scale = math.sqrt(x.shape[1]) / LARGEST
    return (x.float() * (1 / scale)).to(torch.float8_e4m3fn), torch.full((), scale, device=x.device)


def at_once(x: torch.Tensor) -> Rows:
    """x with one scale for all of it."""
    scale = x.abs().amax().float().clamp(min=1e-30) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale


@torch.library.custom_op("niels_gpt::turned_fp8", mutates_args=())
def turned(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) in FP8, its rows times factors (M, 1), as (K, M), M filled up with zeros to a multiple of 16."""
    if not (HAS_TRITON and x.is_cuda):
        scaled = x if factors is None else (x.float() * factors).to(x.dtype)
        filled = torch.nn.functional.pad(scaled.view(torch.uint8), (0, 0, 0, -len(x) % 16))
        return filled.t().contiguous().view(x.dtype)
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    (M, K), made = x.shape, empty_turned(x)
    words = made.view(torch.int32)
    fp8_kernels.turn_kernel[(-(-K // 128), -(-words.shape[1] // 32))](
        x if factors is not None else x.view(torch.uint8), factors, words, M, words.shape[1], K,
        WORDS=32, LANES=128, SCALED=factors is not None, num_warps=4,
    )  # fmt: skip
    return made


@turned.register_fake
def _(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    return empty_turned(x)


def empty_turned(x: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    M, K = x.shape
    return x.new_empty((columns or K, -(-M // 16) * 16), dtype=x.dtype)


def summed(a: Rows, b: Rows) -> torch.Tensor:
    """a b^T in float32, for a (N, M) and b (K, M) with one scale each: a sum over M tokens, in float32.

    With the fast sums of Hopper's products it would be wrong by 0.7 % after 65,536 tokens.
    """
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=torch.float32)


def over_tokens(
    a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, unit: torch.Tensor, *, a_turned: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over all rows t of unit scales[t] a[t]^T b[t] in float32, for a (M, N), b (M, K) and scales (M, 1).

    The gradient of a weight. The hardware wants one scale a side, so those of the rows, whichever side they came from,
    go into b.
    """
    top = scales.amax()
    return summed((turned(a) if a_turned is None else a_turned, top), (turned(b, scales / top), unit))


# --- matrices --------------------------------------------------------------------------------------

Given = list[tuple[list[torch.Tensor], torch.Tensor | None]]


def matrices(given: Given) -> list[Matrix]:
    """For each (matrices, norm): these matrices, one or two below each other, times the weight of a norm."""
    weights = [weight.detach() for members, _ in given for weight in members]
    norms = [norm.detach() for _, norm in given if norm is not None]
    made = _matrices(weights, norms, [len(members) for members, _ in given], [norm is not None for _, norm in given])
    return [(made[i], made[i + 1], made[i + 2], made[i + 3], made[i + 4]) for i in range(0, len(made), 5)]


@torch.library.custom_op("niels_gpt::matrices_fp8", mutates_args=())
def _matrices(
    weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]
) -> list[torch.Tensor]:
    given = _given(weights, norms, numbers, normed)
    if HAS_TRITON and weights[0].is_cuda:
        return [part for matrix in _matrices_at_once(given) for part in matrix]
    made = []
    for members, norm in given:
        whole = torch.cat(members) if norm is None else torch.cat(members) * norm
        eighth, scale = at_once(whole)
        turned = eighth.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
        made += [eighth, turned, scale, *(scale.repeat(size, 1) for size in whole.shape)]
    return made


@_matrices.register_fake
def _(
    weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]
) -> list[torch.Tensor]:
    return [part for members, _ in _given(weights, norms, numbers, normed) for part in _empty_matrix(members)]


def _given(weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]) -> Given:
    """What `matrices` was given, of what an operator can be given."""
    left, scales = iter(weights), iter(norms)
    return [
        ([next(left) for _ in range(number)], next(scales) if with_norm else None)
        for number, with_norm in zip(numbers, normed, strict=True)
    ]


def _empty_matrix(members: list[torch.Tensor]) -> Matrix:
    N, K = sum(map(len, members)), members[0].shape[1]
    eighth, turned = (members[0].new_empty(shape, dtype=torch.float8_e4m3fn) for shape in ((N, K), (K, N)))
    one, by_row, by_column = (members[0].new_empty(size, dtype=torch.float32) for size in ((), (N, 1), (K, 1)))
    return eighth, turned, one, by_row, by_column


def _matrices_at_once(given: Given) -> list[Matrix]:
    """In two passes over all of them: one by one they would take 18 small kernels."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    PARTS, B = 256, 64
    made: list[Matrix] = []
    sources: list[tuple[Any, ...]] = []  # the arguments of matrices_kernel, for each matrix that is given
    starts = [0]
    for members, norm in given:
        eighth, turned, one, by_row, by_column = matrix = _empty_matrix(members)
        made.append(matrix)
        row, group = 0, len(sources)
        for member in members:
            height, K = member.shape
            places = eighth[row:], turned[:, row:], one, by_row[row:], by_column
            sources.append((member.contiguous(), norm, *places, height, K, len(eighth), group, len(members)))
            starts.append(starts[-1] + -(-height // B) * -(-K // B))
            row += height
    weights, norms, *targets, heights, widths, strides, groups, numbers = zip(*sources, strict=True)
    tops = weights[0].new_empty((len(weights), PARTS), dtype=torch.float32)
    sizes = tuple(weight.numel() for weight in weights)
    fp8_kernels.tops_kernel[(PARTS, len(weights))](weights, norms, sizes, widths, tops, PARTS=PARTS, BLOCK=1024)
    fp8_kernels.matrices_kernel[(starts[-1],)](
        weights, norms, *targets, heights, widths, strides, groups, numbers, tuple(starts), tops, PARTS=PARTS, B=B
    )
    return made
