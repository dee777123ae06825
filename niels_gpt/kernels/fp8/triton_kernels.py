"""Triton kernels that write operands of the next matmul in FP8; `quantize.py` and `matmul.py` call them."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.cuda.ops_triton import activated, activation_gradients, power_of_two_scale


@triton.jit
def rows_kernel(x, quantized, scales, C, BLOCK: tl.constexpr):
    """One row of (M, C) in FP8, with its scale."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < C
    u = tl.load(x + row * C + lanes, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(u), 0))
    tl.store(scales + row, scale)
    tl.store(quantized + row * C + lanes, (u * inverse).to(quantized.dtype.element_ty), mask=inside)


@triton.jit
def _byte(value, i: tl.constexpr, KIND: tl.constexpr):
    """value in FP8, as byte i of a word.

    The + 0.0 works around ptxas 12.8: if a value is converted both for a store and for another use, it packs four into
    one register and reads the second from a register that is not written yet. The compiler cannot know that x + 0 is x.
    """
    return (value + 0.0).to(KIND).to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * i)


@triton.jit
def transpose_kernel(
    x, factors, transposed, M, words, K, WORDS: tl.constexpr, LANES: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """A tile of x (M, K), its rows times factors if SCALED, transposed into (K, 4 words); 0 past M.

    It is written in words of four tokens: threads exchange a quarter of the data that they would in bytes.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, :]
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    packed = tl.zeros((WORDS, LANES), tl.uint32)
    for i in tl.static_range(4):
        token = 4 * word + i
        inside = (token < M)[:, None] & (lanes < K)
        if SCALED:
            value = tl.load(x + token[:, None] * K + lanes, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(factors + token, mask=token < M, other=0.0)[:, None]
            packed |= _byte(value * factor, i, x.dtype.element_ty)
        else:
            packed |= tl.load(x + token[:, None] * K + lanes, mask=inside, other=0).to(tl.uint32) << (8 * i)
    tl.store(transposed + lanes * words + word[:, None], packed, mask=(word < words)[:, None] & (lanes < K))


@triton.jit
def activation_kernel(x, quantized, scales, bounds, F, PIECE: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr):
    """One row of activations in FP8, with its scale and a bound on |gradient of the input| / |gradient of the output|.

    Both come from the absolute maximum of the input: |gelu(x)| <= |x|, and |silu(gate) up| <= |gate| |up|.
    """
    row = tl.program_id(0).to(tl.int64)
    width = 2 * F if GATED else F
    at = x + row * width
    lanes = tl.arange(0, PIECE)
    top = tl.zeros((PIECE,), tl.float32)
    top_up = tl.zeros((PIECE,), tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + lanes
        top = tl.maximum(top, tl.abs(tl.load(at + column, mask=column < F, other=0.0).to(tl.float32)))
        if GATED:
            top_up = tl.maximum(top_up, tl.abs(tl.load(at + F + column, mask=column < F, other=0.0).to(tl.float32)))
    largest = tl.max(top, 0)
    bound = 1.13  # the maximum of GELU'; that of silu' is 1.1
    if GATED:
        largest_up = tl.max(top_up, 0)
        bound = tl.maximum(1.1 * largest_up, largest)
        largest *= largest_up
    scale, inverse = power_of_two_scale(largest)
    tl.store(scales + row, scale)
    tl.store(bounds + row, bound)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + lanes
        u = tl.load(at + column, mask=column < F, other=0.0).to(tl.float32)
        up = tl.load(at + F + column, mask=column < F, other=0.0).to(tl.float32) if GATED else u
        y = activated(u, GATED, up) * inverse
        tl.store(quantized + row * F + column, y.to(quantized.dtype.element_ty), mask=column < F)


@triton.jit
def _four(base, token, lanes, width, M, limit):
    """Rows token to token + 3 of a matrix, in float32; 0 past M."""
    at = base + token[:, None] * width + lanes
    inside = lanes < limit
    p = tl.load(at, mask=inside & (token < M)[:, None], other=0.0).to(tl.float32)
    q = tl.load(at + width, mask=inside & (token + 1 < M)[:, None], other=0.0).to(tl.float32)
    r = tl.load(at + 2 * width, mask=inside & (token + 2 < M)[:, None], other=0.0).to(tl.float32)
    s = tl.load(at + 3 * width, mask=inside & (token + 3 < M)[:, None], other=0.0).to(tl.float32)
    return p, q, r, s


@triton.jit
def activation_backward_kernel(
    dy, x, quantized, transposed, again, factors, shares, M, words, F,
    WORDS: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the input of `activation_kernel`, rows times factors, in FP8, as it is and transposed;
    and of its output, rows times shares, transposed into `again`. The transposed ones are 0 past M.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, :]
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    token = 4 * word
    KIND: tl.constexpr = quantized.dtype.element_ty
    width = 2 * F if GATED else F
    g = _four(dy, token, lanes, F, M, F)
    u = _four(x, token, lanes, width, M, F)
    up = _four(x + F, token, lanes, width, M, F) if GATED else u
    first_words = tl.zeros((WORDS, LANES), tl.uint32)
    second_words = tl.zeros((WORDS, LANES), tl.uint32)
    output_words = tl.zeros((WORDS, LANES), tl.uint32)
    for i in tl.static_range(4):
        row = token + i
        factor = tl.load(factors + row, mask=row < M, other=0.0)[:, None]
        share = tl.load(shares + row, mask=row < M, other=0.0)[:, None]
        inside = (row < M)[:, None] & (lanes < F)
        first, second = activation_gradients(g[i] * factor, u[i], GATED, up[i])
        tl.store(quantized + row[:, None] * width + lanes, first.to(KIND), mask=inside)
        first_words |= _byte(first, i, KIND)
        if GATED:
            tl.store(quantized + row[:, None] * width + F + lanes, second.to(KIND), mask=inside)
            second_words |= _byte(second, i, KIND)
        output_words |= _byte(activated(u[i], GATED, up[i]) * share, i, KIND)
    inside = (word < words)[:, None] & (lanes < F)
    at = lanes * words + word[:, None]
    tl.store(transposed + at, first_words, mask=inside)
    if GATED:
        tl.store(transposed + F * words + at, second_words, mask=inside)
    tl.store(again + at, output_words, mask=inside)


@triton.jit
def _scale_of(amax):
    """(scale, 1 / scale) of a matrix with this absolute maximum, which becomes 448, the end of float8_e4m3fn."""
    amax = tl.maximum(amax, 1e-30)
    return amax / 448.0, 448.0 / amax


@triton.jit
def _amax_of(w, norm, size, width, amaxes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The absolute maximum of one part of a matrix of `size` elements in rows of `width`."""
    part = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, size, PARTS * BLOCK):
        at = start + lanes
        value = tl.load(w + at, mask=at < size, other=0.0).to(tl.float32)
        if norm is not None:
            value *= tl.load(norm + at % width)
        top = tl.maximum(top, tl.abs(value))
    tl.store(amaxes + part, tl.max(top, 0))


@triton.jit
def amax_kernel(weights, norms, sizes, widths, amaxes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The absolute maximum of each part of several matrices, whose rows are multiplied by norms if there are any."""
    which = tl.program_id(1)
    for i in tl.static_range(len(weights)):
        if which == i:
            _amax_of(weights[i], norms[i], sizes[i], widths[i], amaxes + i * PARTS, PARTS, BLOCK)


@triton.jit
def _tile_in_fp8(
    tile, w, norm, quantized, transposed, one, row_scales, column_scales, N, K, stride, amaxes, number,
    PARTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, 2 * PARTS)
    scale, inverse = _scale_of(tl.max(tl.load(amaxes + j, mask=j < number * PARTS, other=0.0), 0))
    across = tl.cdiv(K, B)
    n = tile // across * B + tl.arange(0, B)
    k = tile % across * B + tl.arange(0, B)
    inside = (n < N)[:, None] & (k < K)[None, :]
    value = tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        value *= tl.load(norm + k, mask=k < K, other=0.0)[None, :]
    value *= inverse
    kind = quantized.dtype.element_ty
    tl.store(quantized + n[:, None] * K + k[None, :], value.to(kind), mask=inside)
    # Load the tile again, transposed: from the registers ptxas would make one value of four wrong (see `_byte`).
    inside = (k < K)[:, None] & (n < N)[None, :]
    value = tl.load(w + n[None, :] * K + k[:, None], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        value *= tl.load(norm + k, mask=k < K, other=0.0)[:, None]
    value *= inverse
    tl.store(transposed + k[:, None] * stride + n[None, :], value.to(kind), mask=inside)
    tl.store(one, scale, mask=tile == 0)
    if tile % across == 0:
        tl.store(row_scales + n, tl.zeros((B,), tl.float32) + scale, mask=n < N)
    if tile // across == 0:
        tl.store(column_scales + k, tl.zeros((B,), tl.float32) + scale, mask=k < K)


@triton.jit
def matrices_kernel(
    weights, norms, quantized, transposed, one, row_scales, column_scales,
    heights, widths, strides, groups, numbers, starts, amaxes,
    PARTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of one of several matrices (N, K) in FP8, as it is and transposed, with the scale in its three shapes.

    The scale comes from the results of `amax_kernel` for `numbers[i]` matrices from `groups[i]` on.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(weights)):
        if (program >= starts[i]) & (program < starts[i + 1]):
            _tile_in_fp8(
                program - starts[i], weights[i], norms[i], quantized[i], transposed[i],
                one[i], row_scales[i], column_scales[i], heights[i], widths[i], strides[i],
                amaxes + groups[i] * PARTS, numbers[i], PARTS, B,
            )  # fmt: skip
