"""Triton kernels that write in FP8 what is multiplied next; `in_fp8.py` and `fp8.py` call them."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.cuda.ops_triton import activated, activation_gradients, power_of_two_scale


@triton.jit
def rows_kernel(x, eighth, scales, C, BLOCK: tl.constexpr):
    """One row of (M, C) in FP8, with its scale."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < C
    u = tl.load(x + row * C + lanes, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(u), 0))
    tl.store(scales + row, scale)
    tl.store(eighth + row * C + lanes, (u * inverse).to(eighth.dtype.element_ty), mask=inside)


@triton.jit
def _byte(value, i: tl.constexpr, KIND: tl.constexpr):
    """Of value in FP8, as byte i of a word.

    Not of what is converted for a store: ptxas 12.8 packs that into one register, and then takes the second of four for
    other uses from a register that it has not written yet. Of x + 0 the compiler cannot know that it is x.
    """
    return (value + 0.0).to(KIND).to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * i)


@triton.jit
def turn_kernel(
    x, factors, turned, M, words, K, WORDS: tl.constexpr, LANES: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """A tile of x (M, K), SCALED its rows times factors, as (K, 4 words), where what stands past M is 0.

    The turned one is written in words of four tokens: so threads exchange a quarter of what they would in bytes.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, :]
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    made = tl.zeros((WORDS, LANES), tl.uint32)
    for i in tl.static_range(4):
        token = 4 * word + i
        inside = (token < M)[:, None] & (lanes < K)
        if SCALED:
            value = tl.load(x + token[:, None] * K + lanes, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(factors + token, mask=token < M, other=0.0)[:, None]
            made |= _byte(value * factor, i, x.dtype.element_ty)
        else:
            made |= tl.load(x + token[:, None] * K + lanes, mask=inside, other=0).to(tl.uint32) << (8 * i)
    tl.store(turned + lanes * words + word[:, None], made, mask=(word < words)[:, None] & (lanes < K))


@triton.jit
def activate_kernel(x, eighth, scales, reaches, F, PIECE: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr):
    """One row of activations in FP8, with its scale, and how much larger than the gradient of an activation that of
    what went into it can be.

    Both come from the largest that went in: |gelu(x)| <= |x|, and |silu(gate) up| <= |gate| |up|.
    """
    row = tl.program_id(0).to(tl.int64)
    width = 2 * F if GATED else F
    at = x + row * width
    lanes = tl.arange(0, PIECE)
    top = tl.zeros((PIECE,), tl.float32)
    top_up = tl.zeros((PIECE,), tl.float32)
    for piece in tl.static_range(PIECES):
        own = piece * PIECE + lanes
        top = tl.maximum(top, tl.abs(tl.load(at + own, mask=own < F, other=0.0).to(tl.float32)))
        if GATED:
            top_up = tl.maximum(top_up, tl.abs(tl.load(at + F + own, mask=own < F, other=0.0).to(tl.float32)))
    largest = tl.max(top, 0)
    reach = 1.13  # GELU' ends there, and silu' at 1.1
    if GATED:
        largest_up = tl.max(top_up, 0)
        reach = tl.maximum(1.1 * largest_up, largest)
        largest *= largest_up
    scale, inverse = power_of_two_scale(largest)
    tl.store(scales + row, scale)
    tl.store(reaches + row, reach)
    for piece in tl.static_range(PIECES):
        own = piece * PIECE + lanes
        u = tl.load(at + own, mask=own < F, other=0.0).to(tl.float32)
        up = tl.load(at + F + own, mask=own < F, other=0.0).to(tl.float32) if GATED else u
        made = activated(u, GATED, up) * inverse
        tl.store(eighth + row * F + own, made.to(eighth.dtype.element_ty), mask=own < F)


@triton.jit
def _four(base, token, lanes, width, M, limit):
    """Rows token, token + 1, .. + 3 of a matrix, in float32; 0 past M."""
    at = base + token[:, None] * width + lanes
    inside = lanes < limit
    p = tl.load(at, mask=inside & (token < M)[:, None], other=0.0).to(tl.float32)
    q = tl.load(at + width, mask=inside & (token + 1 < M)[:, None], other=0.0).to(tl.float32)
    r = tl.load(at + 2 * width, mask=inside & (token + 2 < M)[:, None], other=0.0).to(tl.float32)
    s = tl.load(at + 3 * width, mask=inside & (token + 3 < M)[:, None], other=0.0).to(tl.float32)
    return p, q, r, s


@triton.jit
def activate_back_kernel(
    dy, x, eighth, turned, again, factors, shares, M, words, F,
    WORDS: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of what `activate_kernel` was given, rows times factors, in FP8, as they are and turned;
    and of what it made, rows times shares, only turned. What stands past M in the turned ones is 0.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, :]
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    token = 4 * word
    KIND: tl.constexpr = eighth.dtype.element_ty
    width = 2 * F if GATED else F
    g = _four(dy, token, lanes, F, M, F)
    u = _four(x, token, lanes, width, M, F)
    up = _four(x + F, token, lanes, width, M, F) if GATED else u
    first_words = tl.zeros((WORDS, LANES), tl.uint32)
    second_words = tl.zeros((WORDS, LANES), tl.uint32)
    made_words = tl.zeros((WORDS, LANES), tl.uint32)
    for i in tl.static_range(4):
        own = token + i
        factor = tl.load(factors + own, mask=own < M, other=0.0)[:, None]
        share = tl.load(shares + own, mask=own < M, other=0.0)[:, None]
        inside = (own < M)[:, None] & (lanes < F)
        first, second = activation_gradients(g[i] * factor, u[i], GATED, up[i])
        tl.store(eighth + own[:, None] * width + lanes, first.to(KIND), mask=inside)
        first_words |= _byte(first, i, KIND)
        if GATED:
            tl.store(eighth + own[:, None] * width + F + lanes, second.to(KIND), mask=inside)
            second_words |= _byte(second, i, KIND)
        made_words |= _byte(activated(u[i], GATED, up[i]) * share, i, KIND)
    inside = (word < words)[:, None] & (lanes < F)
    at = lanes * words + word[:, None]
    tl.store(turned + at, first_words, mask=inside)
    if GATED:
        tl.store(turned + F * words + at, second_words, mask=inside)
    tl.store(again + at, made_words, mask=inside)


@triton.jit
def _scale_of(top):
    """(scale, 1 / scale) of a matrix whose largest element is `top`: it becomes 448, where float8_e4m3fn ends."""
    top = tl.maximum(top, 1e-30)
    return top / 448.0, 448.0 / top


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
    # Read again, the other way round: ptxas would make one value of four a wrong one (`_byte`).
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
