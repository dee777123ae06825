"""Triton kernels that write in FP8 what is multiplied next; `in_fp8.py` calls them."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.model.kernels import _scale_of


@triton.jit
def rows_kernel(x, eighth, scales, C, BLOCK: tl.constexpr):
    """One row of (M, C) in FP8, with its scale."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < C
    u = tl.load(x + row * C + lanes, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _scale_of(tl.max(tl.abs(u), 0))
    tl.store(scales + row, scale)
    tl.store(eighth + row * C + lanes, (u * inverse).to(eighth.dtype.element_ty), mask=inside)


@triton.jit
def _top_of(w, norm, size, width, tops, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of a part of a matrix, of `size` elements in rows of `width`."""
    part = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, size, PARTS * BLOCK):
        at = start + lanes
        value = tl.load(w + at, mask=at < size, other=0.0).to(tl.float32)
        if norm is not None:
            value *= tl.load(norm + at % width)
        top = tl.maximum(top, tl.abs(value))
    tl.store(tops + part, tl.max(top, 0))


@triton.jit
def tops_kernel(weights, norms, sizes, widths, tops, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of several matrices, its rows multiplied by norms where there are any: the largest of each part."""
    which = tl.program_id(1)
    for i in tl.static_range(len(weights)):
        if which == i:
            _top_of(weights[i], norms[i], sizes[i], widths[i], tops + i * PARTS, PARTS, BLOCK)


@triton.jit
def _tile_in_fp8(
    tile, w, norm, eighth, turned, one, by_row, by_column, N, K, stride, tops, number,
    PARTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, 2 * PARTS)
    scale, inverse = _scale_of(tl.max(tl.load(tops + j, mask=j < number * PARTS, other=0.0), 0))
    across = tl.cdiv(K, B)
    n = tile // across * B + tl.arange(0, B)
    k = tile % across * B + tl.arange(0, B)
    inside = (n < N)[:, None] & (k < K)[None, :]
    value = tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        value *= tl.load(norm + k, mask=k < K, other=0.0)[None, :]
    value *= inverse
    kind = eighth.dtype.element_ty
    tl.store(eighth + n[:, None] * K + k[None, :], value.to(kind), mask=inside)
    # Read again, the other way round: a tile that is turned with tl.trans comes out wrong (Triton 3.6, every 4th row).
    inside = (k < K)[:, None] & (n < N)[None, :]
    value = tl.load(w + n[None, :] * K + k[:, None], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        value *= tl.load(norm + k, mask=k < K, other=0.0)[:, None]
    value *= inverse
    tl.store(turned + k[:, None] * stride + n[None, :], value.to(kind), mask=inside)
    tl.store(one, scale, mask=tile == 0)
    if tile % across == 0:
        tl.store(by_row + n, tl.zeros((B,), tl.float32) + scale, mask=n < N)
    if tile // across == 0:
        tl.store(by_column + k, tl.zeros((B,), tl.float32) + scale, mask=k < K)


@triton.jit
def matrices_kernel(
    weights, norms, eighths, turned, one, by_row, by_column, heights, widths, strides, groups, numbers, starts, tops,
    PARTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of one of several matrices (N, K) in FP8, as it is and turned; its scale: once, by row and by column.

    The scale comes from `tops_kernel`: from that of the matrix `groups[i]` and of as many after it as `numbers` says.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(weights)):
        if (program >= starts[i]) & (program < starts[i + 1]):
            _tile_in_fp8(
                program - starts[i], weights[i], norms[i], eighths[i], turned[i], one[i], by_row[i], by_column[i],
                heights[i], widths[i], strides[i], tops + groups[i] * PARTS, numbers[i], PARTS, B,
            )  # fmt: skip
