"""Quantization to FP8: rows of activations and matrices of weights, each with the scale that restores it.

float8_e4m3fn has three bits of mantissa and ends at 448. Scales come from the absolute maximum, or from a bound on it,
and are computed every time: there is no history to store, so a resumed run computes the same. Each row of activations
has its own scale, so that no token costs another precision; it is a power of two, so that a row can change its scale
(`transposed`) without being rounded again. A matrix of weights has one scale. The matrices of a block are quantized
together, as they are and transposed, by two kernels: by block and not by model, because sharded weights are gathered
only while their block runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from niels_gpt.system.device import HAS_TRITON

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""

Rows = tuple[torch.Tensor, torch.Tensor]
"""(M, K) in FP8, and its scale: one () or one per row (M, 1)."""

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""A matrix (N, K) in FP8, its transpose (K, N), and their common scale in three shapes: (), (N, 1) and (K, 1)."""


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """Smallest power-of-two scale that maps [-amax, amax] into the FP8 range (±448)."""
    bits = (amax.float().clamp(min=1e-30) / FP8_MAX).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # round up to the next exponent


def rows(x: torch.Tensor) -> Rows:
    """x (M, K) in FP8, with a scale for each row."""
    if HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling():
        return _rows_in_one_kernel(x)
    scale = power_of_two_scale(x.abs().amax(-1, keepdim=True))
    return (x * (1 / scale)).to(torch.float8_e4m3fn), scale


def _rows_in_one_kernel(x: torch.Tensor) -> Rows:
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    x = x.contiguous()
    (M, K), block = x.shape, 1 << (x.shape[1] - 1).bit_length()
    quantized, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((M, 1), dtype=torch.float32)
    fp8_kernels.rows_kernel[(M,)](x, quantized, scales, K, BLOCK=block, num_warps=min(max(block // 512, 1), 16))
    return quantized, scales


def normed_rows(x: torch.Tensor) -> Rows:
    """x (M, K), the result of a norm without its weight, in FP8 with one scale: |x| <= sqrt(K)."""
    scale = math.sqrt(x.shape[1]) / FP8_MAX
    return (x.float() * (1 / scale)).to(torch.float8_e4m3fn), torch.full((), scale, device=x.device)


def matrix_with_one_scale(x: torch.Tensor) -> Rows:
    """x in FP8 with one scale."""
    scale = x.abs().amax().float().clamp(min=1e-30) / FP8_MAX
    return (x / scale).to(torch.float8_e4m3fn), scale


@torch.library.custom_op("niels_gpt::transposed_fp8", mutates_args=())
def transposed(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose (K, M) of x (M, K) in FP8, rows of x times factors (M, 1); M is zero-padded to a multiple of 16."""
    if not (HAS_TRITON and x.is_cuda):
        scaled = x if factors is None else (x.float() * factors).to(x.dtype)
        filled = torch.nn.functional.pad(scaled.view(torch.uint8), (0, 0, 0, -len(x) % 16))
        return filled.t().contiguous().view(x.dtype)
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    (M, K), out = x.shape, empty_transposed(x)
    words = out.view(torch.int32)
    fp8_kernels.transpose_kernel[(-(-K // 128), -(-words.shape[1] // 32))](
        x if factors is not None else x.view(torch.uint8), factors, words, M, words.shape[1], K,
        WORDS=32, LANES=128, SCALED=factors is not None, num_warps=4,
    )  # fmt: skip
    return out


@transposed.register_fake
def _(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    return empty_transposed(x)


def empty_transposed(x: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    """Memory for the result of `transposed`, of the first columns of x."""
    M, K = x.shape
    return x.new_empty((columns or K, -(-M // 16) * 16), dtype=x.dtype)


def float32_matmul(a: Rows, b: Rows) -> torch.Tensor:
    """a b^T, for a (N, M) and b (K, M) with one scale each: a sum over M tokens, accumulated in float32.

    Hopper's fast accumulation would be wrong by 0.7 % after 65,536 tokens.
    """
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=torch.float32)


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    unit: torch.Tensor,
    *,
    a_transposed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over all rows t of unit scales[t] a[t]^T b[t] in float32, for a (M, N), b (M, K) and scales (M, 1).

    The hardware needs both operands transposed, with one scale each. So the scales of the rows, of whichever operand
    they are, are multiplied into b: as powers of two they cost no rounding (measured on a trained model: 3 % with and
    without).
    """
    top = scales.amax()
    return float32_matmul(
        (transposed(a) if a_transposed is None else a_transposed, top), (transposed(b, scales / top), unit)
    )


# --- matrices --------------------------------------------------------------------------------------

Sources = list[tuple[list[torch.Tensor], torch.Tensor | None]]


def matrices(sources: Sources) -> list[Matrix]:
    """For each (matrices, norm): one or two matrices, concatenated, times the weight of the norm, in FP8."""
    weights = [weight.detach() for members, _ in sources for weight in members]
    norms = [norm.detach() for _, norm in sources if norm is not None]
    numbers, normed = [len(members) for members, _ in sources], [norm is not None for _, norm in sources]
    flat = iter(_matrices(weights, norms, numbers, normed))
    return list(zip(flat, flat, flat, flat, flat, strict=True))  # five tensors per matrix


@torch.library.custom_op("niels_gpt::matrices_fp8", mutates_args=())
def _matrices(
    weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]
) -> list[torch.Tensor]:
    sources = _sources(weights, norms, numbers, normed)
    if HAS_TRITON and weights[0].is_cuda:
        return [part for matrix in _matrices_in_two_kernels(sources) for part in matrix]
    results = []
    for members, norm in sources:
        matrix = torch.cat(members) if norm is None else torch.cat(members) * norm
        quantized, scale = matrix_with_one_scale(matrix)
        transposed = quantized.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
        results += [quantized, transposed, scale, *(scale.repeat(size, 1) for size in matrix.shape)]
    return results


@_matrices.register_fake
def _(
    weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]
) -> list[torch.Tensor]:
    return [part for members, _ in _sources(weights, norms, numbers, normed) for part in _empty_matrix(members)]


def _sources(weights: list[torch.Tensor], norms: list[torch.Tensor], numbers: list[int], normed: list[bool]) -> Sources:
    """The argument of `matrices`, from the types that an operator accepts."""
    left, scales = iter(weights), iter(norms)
    return [
        ([next(left) for _ in range(number)], next(scales) if with_norm else None)
        for number, with_norm in zip(numbers, normed, strict=True)
    ]


def _empty_matrix(members: list[torch.Tensor]) -> Matrix:
    N, K = sum(map(len, members)), members[0].shape[1]
    quantized, transposed = (members[0].new_empty(shape, dtype=torch.float8_e4m3fn) for shape in ((N, K), (K, N)))
    one, row_scales, column_scales = (members[0].new_empty(size, dtype=torch.float32) for size in ((), (N, 1), (K, 1)))
    return quantized, transposed, one, row_scales, column_scales


def _matrices_in_two_kernels(sources: Sources) -> list[Matrix]:
    """Quantize all matrices in two kernels; one by one they would take 18 small ones."""
    from niels_gpt.kernels.fp8 import triton_kernels as fp8_kernels

    PARTS, B = 256, 64
    results: list[Matrix] = []
    arguments: list[tuple[Any, ...]] = []  # of matrices_kernel, per source matrix
    starts = [0]
    for members, norm in sources:
        quantized, transposed, one, row_scales, column_scales = matrix = _empty_matrix(members)
        results.append(matrix)
        row, group = 0, len(arguments)
        for member in members:
            height, K = member.shape
            outputs = quantized[row:], transposed[:, row:], one, row_scales[row:], column_scales
            arguments.append((member.contiguous(), norm, *outputs, height, K, len(quantized), group, len(members)))
            starts.append(starts[-1] + -(-height // B) * -(-K // B))
            row += height
    weights, norms, *targets, heights, widths, strides, groups, numbers = zip(*arguments, strict=True)
    amaxes = weights[0].new_empty((len(weights), PARTS), dtype=torch.float32)
    sizes = tuple(weight.numel() for weight in weights)
    fp8_kernels.amax_kernel[(PARTS, len(weights))](weights, norms, sizes, widths, amaxes, PARTS=PARTS, BLOCK=1024)
    fp8_kernels.matrices_kernel[(starts[-1],)](
        weights, norms, *targets, heights, widths, strides, groups, numbers, tuple(starts), amaxes, PARTS=PARTS, B=B
    )
    return results
