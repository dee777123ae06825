"""Triton kernels that decode one token per row on CUDA; `decode_step.py` puts them in order.

What they read and write is float32. Tensor cores are not: there each number is two, its first 11 bits and its next 11,
as float16 or as tf32, and a product is three; what is left out is as small as float32's own rounding in a sum.

Sizes are arguments and not constants, and so are the kind of a norm and what follows a product: two to four kernels
are compiled for a model, not one per matrix. Nothing is added up in an order that depends on the other rows or on the
clock: the same tokens come again, bit for bit.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton's language is not Python's (it has no (*a, b)), and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOW = tl.constexpr(2048.0)
"""The second of a pair of float16 is multiplied by this, to have the range of the first; decode_step.LOW."""
ROUNDING = tl.constexpr(2.0**-20)
"""Share of a mean square that may be the rounding of its sums."""


@triton.jit
def _ready(PDL: tl.constexpr):
    """Wait until the kernel before is done, and let the next one come up: two at most share the device."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _activated(value, epilogue):
    """GELU where epilogue is 1."""
    if epilogue == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def vector_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: out = epilogue(w norm(x)), BN of the N rows of w (N, K) per program.

    norm: 0 none, 1 LayerNorm, 2 RMSNorm, both with K <= BK and without their weight, which is part of w. epilogue: 0
    store, 1 GELU, 2 SwiGLU (rows of w: up and gate in turns), 3 add to out.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    lanes = tl.arange(0, BK)
    at = w + n[:, None] * K + lanes[None, :]
    inside = (n < N)[:, None]
    if PDL:
        gdc_launch_dependents()
    w_k = tl.load(at, mask=inside & (lanes < K)[None, :], other=0.0)  # depends on no kernel: while the last one ends
    if PDL:
        gdc_wait()
    summed = tl.zeros([BN, BK], tl.float32)
    for k0 in range(0, K, BK):
        ok = lanes < K - k0
        value = tl.load(x + k0 + lanes, mask=ok, other=0.0)
        if norm > 0:
            if norm == 1:
                value = tl.where(ok, value - tl.sum(value, 0) / K, 0.0)
            value = value / tl.sqrt(tl.sum(value * value, 0) / K + eps)
        summed += value[None, :] * w_k
        w_k = tl.load(at + k0 + BK, mask=inside & (lanes < K - k0 - BK)[None, :], other=0.0)
    result = _activated(tl.sum(summed, 1), epilogue)
    if epilogue == 2:
        up, gate = tl.split(tl.reshape(result, (BN // 2, 2)))
        half = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(out + half, up * gate / (1.0 + tl.exp(-gate)), mask=half * 2 < N)
    else:
        if epilogue == 3:
            result += tl.load(out + n, mask=n < N, other=0.0)
        tl.store(out + n, result, mask=n < N)


@triton.jit
def _moments(moments, b, rows, parts, norm, PARTS: tl.constexpr):
    """The sums that a norm of the rows b needs, as their writers left them: (row, part, 2)."""
    j = tl.arange(0, PARTS)
    at = moments + (b[:, None] * parts + j[None, :]) * 2
    there = (j < parts)[None, :]
    sums = tl.load(at, mask=there & (b < tl.where(norm == 1, rows, 0))[:, None], other=0.0)
    squares = tl.load(at + 1, mask=there & (b < tl.where(norm > 0, rows, 0))[:, None], other=0.0)
    return sums, squares


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _mean_and_scale(sums, squares, K, eps, norm):
    """Of every row, from _moments. A variance that rounding has eaten, or made negative, is not less than rounding."""
    total, square = tl.reduce((sums, squares), 1, _add_both)
    mean = total / K
    square = square / K
    variance = tl.maximum(square - mean * mean, square * ROUNDING)
    return mean, tl.where(norm > 0, 1.0 / tl.sqrt(variance + eps), 1.0)


@triton.jit
def _residual(out, b, n, N, rows, epilogue):
    """What a product is added to; else 0."""
    where = (b < tl.where(epilogue == 3, rows, 0))[:, None] & (n < N)[None, :]
    return tl.load(out + b[:, None] * N + n[None, :], mask=where, other=0.0)


@triton.jit
def _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M: tl.constexpr, BN: tl.constexpr):
    """From a product (M, BN), the residual added, to what is stored."""
    result = _activated(result, epilogue)
    if epilogue == 2:
        up, gate = tl.split(tl.reshape(result, (M, BN // 2, 2)))
        half = tile * (BN // 2) + tl.arange(0, BN // 2)
        to_half = out + b[:, None] * (N // 2) + half[None, :]
        tl.store(to_half, up * gate / (1.0 + tl.exp(-gate)), mask=(b < rows)[:, None] & (half * 2 < N)[None, :])
    else:
        n = tile * BN + tl.arange(0, BN)
        where = (b < rows)[:, None] & (n < N)[None, :]
        if epilogue == 3:
            result = tl.where(where, result, 0.0)
            mine = moments + (b * parts + tile) * 2
            tl.store(mine, tl.sum(result, 1), mask=b < rows)
            tl.store(mine + 1, tl.sum(result * result, 1), mask=b < rows)
        tl.store(out + b[:, None] * N + n[None, :], result, mask=where)


@triton.jit
def _weights(w, n, k, N, K):
    """Rows n and columns k (SPLIT, BK) of w (N, K), as (SPLIT, BK, BN)."""
    inside = (k < K)[:, :, None] & (n < N)[None, None, :]
    return tl.load(w + n[None, None, :] * K + k[:, :, None], mask=inside, other=0.0)


@triton.jit
def _values(x, b, k, rows, K):
    """Rows b and columns k (SPLIT, BK) of x (rows, K), as (SPLIT, M, BK)."""
    inside = (k < K)[:, None, :] & (b < rows)[None, :, None]
    return tl.load(x + b[None, :, None] * K + k[:, None, :], mask=inside, other=0.0)


@triton.jit
def _not_before(value):
    """The same, from here on: else its way through shared memory, and so the wait for it, moves up to its load."""
    PACK: tl.constexpr = 32 // value.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=PACK)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def paired_kernel(
    x, w, factor, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M rows and BN columns of out = epilogue(norm(x) w^T) for x (rows, K), K <= SPLIT BK; else as vector_kernel.

    There is a norm, and no addition: whatever x is, |norm(x)| <= sqrt(K) fits float16. w (2, N, K) and factor (N) are
    pairs of float16 as `Weights.paired` makes them; x is made into such pairs here. Each of SPLIT warps has its own
    piece of K, and every load is under way before any is used. moments: the sums over x, in parts.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    if PDL:
        gdc_launch_dependents()
    factors = tl.load(factor + n, mask=n < N, other=0.0)  # while the last kernel ends
    w_high = _weights(w, n, k, N, K)
    w_low = _weights(w + N * K, n, k, N, K)
    if PDL:
        gdc_wait()
    sums, squares = _moments(moments, b, rows, parts, norm, PARTS)
    value = _values(x, b, k, rows, K)
    w_high = _not_before(w_high)
    w_low = _not_before(w_low)
    mean, scale = _mean_and_scale(sums, squares, K, eps, norm)
    value = (value - mean[None, :, None]) * scale[None, :, None]
    value = tl.where((k < K)[:, None, :], value, 0.0)
    high = value.to(tl.float16)
    low = ((value - high.to(tl.float32)) * LOW).to(tl.float16)
    acc = tl.dot(high, w_low, tl.dot(low, w_high)) * (1.0 / LOW)
    result = tl.sum(tl.dot(high, w_high, acc), 0) * factors[None, :]
    _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M, BN)


@triton.jit
def _rounded(value):
    """To tf32, which lacks the last 13 bits of float32."""
    return ((value.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)).to(tl.float32, bitcast=True)


@triton.jit
def _three_products(value, weight):
    """value (SPLIT, M, BK) times weight (SPLIT, BK, BN), both float32: the bits that tf32 has, and the rest."""
    v_high, w_high = _rounded(value), _rounded(weight)
    acc = tl.dot(value - v_high, w_high, input_precision="tf32")
    acc = tl.dot(v_high, weight - w_high, acc, input_precision="tf32")
    return tl.dot(v_high, w_high, acc, input_precision="tf32")


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def lean_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PIECES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As paired_kernel, without a norm and in float32: out = epilogue(x w^T) for K <= PIECES SPLIT BK, PIECES <= 4.

    moments: the sums over out after an addition are written, one part for BN columns.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    if PDL:
        gdc_launch_dependents()
    weights, values = (), ()
    for piece in tl.static_range(PIECES):
        weights = weights + (_weights(w, n, k + piece * SPLIT * BK, N, K),)
    if PDL:
        gdc_wait()
    residual = _residual(out, b, n, N, rows, epilogue)
    for piece in tl.static_range(PIECES):
        values = values + (_values(x, b, k + piece * SPLIT * BK, rows, K),)
    acc = _three_products(values[0], weights[0])
    for piece in tl.static_range(1, PIECES):
        acc += _three_products(values[piece], weights[piece])
    result = tl.sum(acc, 0) + _not_before(residual)
    _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M, BN)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def deep_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As lean_kernel, for any K and after a norm too: each of SPLIT warps takes every SPLIT-th piece of K.

    With a norm it is (w x - mean shift) scale, shift = w 1.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    x_at = x + b[None, :, None] * K + k[:, None, :]
    w_at = w + n[None, None, :] * K + k[:, :, None]
    _ready(PDL)
    sums, squares = _moments(moments, b, rows, parts, norm, PARTS)
    mean, scale = _mean_and_scale(sums, squares, K, eps, norm)
    acc = tl.zeros([SPLIT, M, BN], tl.float32)
    for k0 in tl.range(0, K, SPLIT * BK, num_stages=STAGES):
        ok = k < K - k0
        value = tl.load(x_at + k0, mask=ok[:, None, :] & (b < rows)[None, :, None], other=0.0)
        weight = tl.load(w_at + k0, mask=ok[:, :, None] & (n < N)[None, None, :], other=0.0)
        acc = tl.dot(value, weight, acc, input_precision="tf32x3")
    result = tl.sum(acc, 0)
    if norm == 1:
        result -= mean[:, None] * tl.load(shift + n, mask=n < N, other=0.0)[None, :]
    result = result * scale[:, None] + _residual(out, b, n, N, rows, epilogue)
    _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M, BN)


@triton.jit(do_not_specialize=["T", "H", "span"])
def attend_kernel(
    qkv, sin, cos, cache, part, edges, arrived, y, lengths, slots, T, H, span, scale,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, head and span of keys: turns q and k, stores k and v, attends.

    Every lane of BS keys has a maximum and sums of its own until all keys are seen: no warp waits for another before.
    A row that is longer than a span is put together by the program that ends last. cache: (slot, 2, H, T, D).
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _ready(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    pos = tl.minimum(tl.load(lengths + slot), T - 1)
    start = split * span
    if start <= pos:
        d = tl.arange(0, DP)
        ok = d < D
        keys = cache + (slot * 2 * H + h) * T * D
        values = cache + ((slot * 2 + 1) * H + h) * T * D
        at = qkv + b * 3 * H * D + h * D
        q = tl.load(at + d, mask=ok, other=0.0)
        key = tl.load(at + H * D + d, mask=ok, other=0.0)
        new = tl.load(at + 2 * H * D + d, mask=ok, other=0.0)
        if ROPE:
            c = tl.load(cos + pos * (D // 2) + d // 2, mask=ok, other=0.0)
            s = tl.load(sin + pos * (D // 2) + d // 2, mask=ok, other=0.0)
            s = tl.where(d % 2 == 0, -s, s)
            q = q * c + tl.load(at + (d ^ 1), mask=ok, other=0.0) * s
            key = key * c + tl.load(at + H * D + (d ^ 1), mask=ok, other=0.0) * s
        q = q * scale
        lane = tl.arange(0, BS)
        tops = tl.full([BS], -1e30, tl.float32)
        weights = tl.zeros([BS], tl.float32)
        sums = tl.zeros([BS, DP], tl.float32)
        end = tl.minimum(start + span, pos)
        for s0 in tl.range(start, end, BS, num_stages=STAGES):
            place = s0 + lane
            seen = place < end
            where = seen[:, None] & ok[None, :]
            k_s = tl.load(keys + place[:, None] * D + d[None, :], mask=where, other=0.0)
            v_s = tl.load(values + place[:, None] * D + d[None, :], mask=where, other=0.0)
            score = tl.where(seen, tl.sum(k_s * q[None, :], 1), -1e30)
            higher = tl.maximum(tops, score)
            old = tl.exp(tops - higher)
            p = tl.where(seen, tl.exp(score - higher), 0.0)
            weights = weights * old + p
            sums = sums * old[:, None] + p[:, None] * v_s
            tops = higher
        own = pos < start + span  # the new token belongs to this span
        score = tl.where(own, tl.sum(q * key, 0), -1e30)
        top = tl.maximum(tl.max(tops, 0), score)
        share = tl.exp(tops - top)
        p_own = tl.where(own, tl.exp(score - top), 0.0)
        weight = tl.sum(weights * share, 0) + p_own
        acc = tl.sum(sums * share[:, None], 0) + p_own * new
        if own:
            tl.store(keys + pos * D + d, key, mask=ok)
            tl.store(values + pos * D + d, new, mask=ok)
        parts = pos // span + 1
        to = y + (b * H + h) * D + d
        if parts == 1:
            tl.store(to, acc / weight, mask=ok)
        else:
            mine = (b * H + h) * SPLITS
            tl.store(part + (mine + split) * D + d, acc, mask=ok)
            tl.store(edges + (mine + split) * 2, top)
            tl.store(edges + (mine + split) * 2 + 1, weight)
            tl.debug_barrier()  # every thread has stored before one says so
            before = tl.atomic_add(arrived + b * H + h, 1, sem="acq_rel", scope="gpu")
            if before == parts - 1:
                tl.store(arrived + b * H + h, 0)
                j = tl.arange(0, SPLITS)
                there = j < parts
                m_j = tl.load(edges + (mine + j) * 2, mask=there, other=-1e30, cache_modifier=".cg")
                w_j = tl.load(edges + (mine + j) * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                o_j = tl.load(
                    part + (mine + j)[:, None] * D + d[None, :],
                    mask=there[:, None] & ok[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                rescale = tl.exp(m_j - tl.max(m_j, 0))
                tl.store(to, tl.sum(o_j * rescale[:, None], 0) / tl.sum(w_j * rescale, 0), mask=ok)


@triton.jit
def _order(value):
    """Integers in the order of floats."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _first_above(mass, index, threshold, LAST: tl.constexpr):
    """The first index up to which there is more mass than the threshold; rounding aside, the last that has any."""
    some = mass > 0.0
    first = tl.min(tl.where(some & (tl.cumsum(mass, 0) > threshold), index, LAST), 0)
    return tl.where(first < LAST, first, tl.max(tl.where(some, index, 0), 0))


@triton.jit(do_not_specialize=["V", "T", "C", "parts", "width", "idle", "stock"])
def choose_kernel(
    logits, embedding, places, h, moments, lengths, tokens, slots, ring, clock, uniform, drawn, numbers, counts,
    scratch, V, T, C, parts, width, idle, stock,
    VP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr,
    LEARNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The next token of a row: into the ring, and its embedding into h. `sampling.choose`, without sorting.

    numbers: temperature, top_p, min_p of a slot; counts: top_k. uniform holds the next `stock` numbers of a slot, in a
    ring. Slot `idle` is nobody's: it does not grow.
    """
    b = tl.program_id(0)
    _ready(PDL)
    slot = tl.load(slots + b)
    pos = tl.load(lengths + slot)
    now = tl.load(clock + b)
    turn = tl.load(drawn + slot)
    i = tl.arange(0, VP)
    ok = i < V
    value = tl.load(logits + b * V + i, mask=ok, other=float("-inf"))
    best = tl.max(value, 0)
    token = tl.argmax(value, 0)
    temperature = tl.load(numbers + slot * 3)
    if temperature > 0.0:
        top_p = tl.load(numbers + slot * 3 + 1)
        min_p = tl.load(numbers + slot * 3 + 2)
        top_k = tl.load(counts + slot)
        # exp in float64 is long: a loop over pieces keeps the code small, and its values out of the registers
        mine = scratch + b * VP
        PIECE: tl.constexpr = min(VP, 1024)
        for i0 in range(0, VP, PIECE):
            j0 = i0 + tl.arange(0, PIECE)
            piece = tl.load(logits + b * V + j0, mask=j0 < V, other=float("-inf")).to(tl.float64)
            tl.store(mine + j0, tl.where(j0 < V, tl.exp((piece - best.to(tl.float64)) / temperature), 0.0))
        tl.debug_barrier()
        key = _order(value)
        least = tl.min(tl.where(ok, key, 0x7FFFFFFF), 0).to(tl.int64)
        most = tl.max(key, 0).to(tl.int64)
        floor = least  # a token needs a key of at least floor, and one above edge or else an index up to cut
        edge = least - 1
        cut = V
        if top_k < V:
            high = most + 1
            number = V  # of tokens at and above floor: at least k
            if top_k <= GROUP:  # the best of as many groups are at least k tokens
                best_of = tl.max(tl.reshape(tl.where(ok, key, -0x7FFFFFFF), (VP // GROUP, GROUP)), 0)
                floor = tl.maximum(floor, tl.min(best_of, 0).to(tl.int64))
            while (high - floor > 1) & (number != top_k):
                middle = (floor + high) >> 1
                found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
                number = tl.where(found >= top_k, found, number)
                floor = tl.where(found >= top_k, middle, floor)
                high = tl.where(found >= top_k, high, middle)
        if top_p < 1.0:
            p = tl.load(mine + i)
            share = top_p * tl.sum(p, 0)
            edge = least
            high = most + 1
            while high - edge > 1:  # the largest key at and above which the mass is top_p
                middle = (edge + high) >> 1
                enough = tl.sum(tl.where(key >= middle.to(tl.int32), p, 0.0), 0) >= share
                edge = tl.where(enough, middle, edge)
                high = tl.where(enough, high, middle)
            sure = tl.sum(tl.where(key > edge.to(tl.int32), p, 0.0), 0)
            ties = tl.where(key == edge.to(tl.int32), p, 0.0)
            cut = 0
            for j in range(BITS):  # of equal tokens the first come first
                try_cut = cut + (1 << (BITS - 1 - j))
                cut = tl.where(sure + tl.sum(tl.where(i < try_cut, ties, 0.0), 0) < share, try_cut, cut)
        p = tl.load(mine + i)
        passed = (key >= floor.to(tl.int32)) & ((key > edge) | ((key == edge) & (i <= cut))) & (p >= min_p)
        tl.store(mine + i, tl.where(passed, p, 0.0))
        tl.debug_barrier()
        # The inverse of the cumulative distribution, by groups and then in one. Never a token of probability 0.
        g = tl.arange(0, VP // GROUP)
        lane = tl.arange(0, GROUP)
        mass = tl.sum(tl.load(mine + g[:, None] * GROUP + lane[None, :]), 1)
        threshold = tl.load(uniform + slot * stock + turn % stock) * tl.sum(mass, 0)
        group = _first_above(mass, g, threshold, VP)
        left = threshold - tl.sum(tl.where(g < group, mass, 0.0), 0)
        token = group * GROUP + _first_above(tl.load(mine + group * GROUP + lane), lane, left, VP)
    tl.debug_barrier()  # every warp has read the state that changes now
    tl.store(tokens + slot, token)
    tl.store(ring + (now % width) * tl.num_programs(0) + b, token)
    tl.store(clock + b, now + 1)
    tl.store(drawn + slot, turn + 1)
    tl.store(lengths + slot, tl.where(slot == idle, 0, tl.minimum(pos + 1, T)))
    c = tl.arange(0, CP)
    row = tl.load(embedding + token.to(tl.int64) * C + c, mask=c < C, other=0.0)
    if LEARNED:
        row += tl.load(places + tl.minimum(pos + 1, T - 1) * C + c, mask=c < C, other=0.0)
    tl.store(h + b * C + c, row, mask=c < C)
    j = tl.arange(0, PARTS)  # the sums over it that a norm needs, as one part
    at = moments + (b * parts + j) * 2
    tl.store(at, tl.where(j == 0, tl.sum(row, 0), 0.0), mask=j < parts)
    tl.store(at + 1, tl.where(j == 0, tl.sum(row * row, 0), 0.0), mask=j < parts)
