"""Triton kernels that decode one token per row on CUDA in float32; `decode_step.py` puts them in order.

Sizes are arguments and not constants, and so are a norm before a product and what follows it: two or three kernels
are compiled for a model, not one per matrix. Nothing is added up in an order that depends on the other rows or on the
clock: the same tokens come again, bit for bit.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def _moments(moments, b, rows, parts, K, eps, norm, M: tl.constexpr, PARTS: tl.constexpr):
    """Mean and 1 / deviation of the rows b of a norm's input, from the sums that its writers left: (row, part, 2)."""
    mean = tl.zeros([M], tl.float32)
    scale = tl.zeros([M], tl.float32) + 1.0
    if norm > 0:
        j = tl.arange(0, PARTS)
        at = moments + (b[:, None] * parts + j[None, :]) * 2
        where = (b < rows)[:, None] & (j < parts)[None, :]
        square = tl.sum(tl.load(at + 1, mask=where, other=0.0), 1) / K
        if norm == 1:
            mean = tl.sum(tl.load(at, mask=where, other=0.0), 1) / K
            square -= mean * mean
        scale = 1.0 / tl.sqrt(square + eps)
    return mean, scale


@triton.jit
def _finish(
    result, mean, scale, shift, out, moments, b, tile, N, rows, parts, norm, epilogue, M: tl.constexpr, BN: tl.constexpr
):
    """From a product w' x (M, BN) to what is stored. With a norm it is (w' x - mean shift) scale, shift = w' 1."""
    n = tile * BN + tl.arange(0, BN)
    if norm == 1:
        result -= mean[:, None] * tl.load(shift + n, mask=n < N, other=0.0)[None, :]
    result = _activated(result * scale[:, None], epilogue)
    if epilogue == 2:
        up, gate = tl.split(tl.reshape(result, (M, BN // 2, 2)))
        half = tile * (BN // 2) + tl.arange(0, BN // 2)
        to_half = out + b[:, None] * (N // 2) + half[None, :]
        tl.store(to_half, up * gate / (1.0 + tl.exp(-gate)), mask=(b < rows)[:, None] & (half * 2 < N)[None, :])
    else:
        to = out + b[:, None] * N + n[None, :]
        where = (b < rows)[:, None] & (n < N)[None, :]
        if epilogue == 3:
            result += tl.load(to, mask=where, other=0.0)
            result = tl.where(where, result, 0.0)
            mine = moments + (b * parts + tile) * 2
            tl.store(mine, tl.sum(result, 1), mask=b < rows)
            tl.store(mine + 1, tl.sum(result * result, 1), mask=b < rows)
        tl.store(to, result, mask=where)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def wide_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M rows and BN columns: out = epilogue(norm(x) w^T) for x (rows, K), K <= SPLIT BK; else as vector_kernel.

    Each of SPLIT warps has its own piece of K; products of float32 are three of tf32. moments: sums over x of a norm
    are read, those over out after an addition are written, one part for BN columns.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    ok = k < K
    if PDL:
        gdc_launch_dependents()
    inside = ok[:, :, None] & (n < N)[None, None, :]
    weight = tl.load(w + n[None, None, :] * K + k[:, :, None], mask=inside, other=0.0)  # while the last kernel ends
    if PDL:
        gdc_wait()
    mean, scale = _moments(moments, b, rows, parts, K, eps, norm, M, PARTS)
    where = ok[:, None, :] & (b < rows)[None, :, None]
    value = tl.load(x + b[None, :, None] * K + k[:, None, :], mask=where, other=0.0)
    result = tl.sum(tl.dot(value, weight, input_precision="tf32x3"), 0)
    _finish(result, mean, scale, shift, out, moments, b, tile, N, rows, parts, norm, epilogue, M, BN)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def deep_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As wide_kernel, for any K: each of SPLIT warps takes every SPLIT-th piece of it."""
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    x_at = x + b[None, :, None] * K + k[:, None, :]
    w_at = w + n[None, None, :] * K + k[:, :, None]
    _ready(PDL)
    mean, scale = _moments(moments, b, rows, parts, K, eps, norm, M, PARTS)
    acc = tl.zeros([SPLIT, M, BN], tl.float32)
    for k0 in tl.range(0, K, SPLIT * BK, num_stages=STAGES):
        ok = k < K - k0
        value = tl.load(x_at + k0, mask=ok[:, None, :] & (b < rows)[None, :, None], other=0.0)
        weight = tl.load(w_at + k0, mask=ok[:, :, None] & (n < N)[None, None, :], other=0.0)
        acc = tl.dot(value, weight, acc, input_precision="tf32x3")
    _finish(tl.sum(acc, 0), mean, scale, shift, out, moments, b, tile, N, rows, parts, norm, epilogue, M, BN)


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
