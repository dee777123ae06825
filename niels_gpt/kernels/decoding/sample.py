"""Triton kernel: sample the next token of a decode step, without sorting the logits."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.decoding.matmul import ready


@triton.jit
def _order(value):
    """Integers that sort as the floats do; 0.0 and -0.0 are equal."""
    bits = tl.where(value == 0.0, 0, value.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _first_above(mass, index, threshold, LAST: tl.constexpr):
    """The first index whose cumulative mass exceeds the threshold; if rounding prevents that, the last with mass."""
    some = mass > 0.0
    first = tl.min(tl.where(some & (tl.cumsum(mass, 0) > threshold), index, LAST), 0)
    return tl.where(first < LAST, first, tl.max(tl.where(some, index, 0), 0))


@triton.jit(do_not_specialize=["V", "T", "C", "parts", "width", "idle", "stock"])
def sample_kernel(
    logits, embedding, positions, h, moments, lengths, tokens, slots, ring, clock, uniform, drawn, numbers, counts,
    scratch, V, T, C, parts, width, idle, stock,
    VP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr,
    LEARNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample the next token of a row, write it into the ring and its embedding into h. As `sampling.choose`.

    numbers: temperature, top_p, min_p of a slot; counts: top_k. uniform: a ring with the next `stock` random numbers of
    a slot. Slot `idle` belongs to no request: it does not grow.
    """
    b = tl.program_id(0)
    ready(PDL)
    slot = tl.load(slots + b)
    pos = tl.load(lengths + slot)
    now = tl.load(clock + b)
    draw = tl.load(drawn + slot)
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
        # exp in float64 is long code: a loop over chunks keeps it small and its results out of the registers
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
        # A token passes with (key, index) up to both (floor, last) of top_k and (edge, cut) of top_p.
        floor = least
        last = V
        edge = least - 1
        cut = V
        if top_k < V:
            high = most + 1
            number = V  # tokens with key >= floor: at least top_k
            if top_k <= GROUP:  # the maxima of GROUP groups are at least top_k tokens
                best_of = tl.max(tl.reshape(tl.where(ok, key, -0x7FFFFFFF), (VP // GROUP, GROUP)), 0)
                floor = tl.maximum(floor, tl.min(best_of, 0).to(tl.int64))
            while (high - floor > 1) & (number != top_k):
                middle = (floor + high) >> 1
                found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
                number = tl.where(found >= top_k, found, number)
                floor = tl.where(found >= top_k, middle, floor)
                high = tl.where(found >= top_k, high, middle)
            if number > top_k:  # more tokens have the k-th logit than fit: the first ones are taken
                tied = key == floor.to(tl.int32)
                wanted = top_k - tl.sum((key > floor.to(tl.int32)).to(tl.int32), 0)
                last = 0
                for j in range(BITS):
                    try_last = last + (1 << (BITS - 1 - j))
                    last = tl.where(tl.sum((tied & (i < try_last)).to(tl.int32), 0) < wanted, try_last, last)
        if top_p < 1.0:
            p = tl.load(mine + i)
            share = top_p * tl.sum(p, 0)
            edge = least
            high = most + 1
            while high - edge > 1:  # the largest key with mass top_p at and above it
                middle = (edge + high) >> 1
                enough = tl.sum(tl.where(key >= middle.to(tl.int32), p, 0.0), 0) >= share
                edge = tl.where(enough, middle, edge)
                high = tl.where(enough, high, middle)
            sure = tl.sum(tl.where(key > edge.to(tl.int32), p, 0.0), 0)
            ties = tl.where(key == edge.to(tl.int32), p, 0.0)
            cut = 0
            for j in range(BITS):  # among equal logits the first tokens are taken
                try_cut = cut + (1 << (BITS - 1 - j))
                cut = tl.where(sure + tl.sum(tl.where(i < try_cut, ties, 0.0), 0) < share, try_cut, cut)
        p = tl.load(mine + i)
        in_k = (key > floor.to(tl.int32)) | ((key == floor.to(tl.int32)) & (i <= last))
        passed = in_k & ((key > edge) | ((key == edge) & (i <= cut))) & (p >= min_p)
        tl.store(mine + i, tl.where(passed, p, 0.0))
        tl.debug_barrier()
        # Invert the cumulative distribution, first over groups, then inside one. Never a token of probability 0.
        g = tl.arange(0, VP // GROUP)
        lane = tl.arange(0, GROUP)
        mass = tl.sum(tl.load(mine + g[:, None] * GROUP + lane[None, :]), 1)
        threshold = tl.load(uniform + slot * stock + draw % stock) * tl.sum(mass, 0)
        group = _first_above(mass, g, threshold, VP)
        left = threshold - tl.sum(tl.where(g < group, mass, 0.0), 0)
        token = group * GROUP + _first_above(tl.load(mine + group * GROUP + lane), lane, left, VP)
    tl.debug_barrier()  # all warps have read the state before it changes
    tl.store(tokens + slot, token)
    tl.store(ring + (now % width) * tl.num_programs(0) + b, token)
    tl.store(clock + b, now + 1)
    tl.store(drawn + slot, draw + 1)
    tl.store(lengths + slot, tl.where(slot == idle, 0, tl.minimum(pos + 1, T)))
    c = tl.arange(0, CP)
    row = tl.load(embedding + token.to(tl.int64) * C + c, mask=c < C, other=0.0)
    if LEARNED:
        row += tl.load(positions + tl.minimum(pos + 1, T - 1) * C + c, mask=c < C, other=0.0)
    tl.store(h + b * C + c, row, mask=c < C)
    j = tl.arange(0, PARTS)  # the sums that the next norm needs, as one part
    at = moments + (b * parts + j) * 2
    tl.store(at, tl.where(j == 0, tl.sum(row, 0), 0.0), mask=j < parts)
    tl.store(at + 1, tl.where(j == 0, tl.sum(row * row, 0), 0.0), mask=j < parts)
