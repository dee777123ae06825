"""Triton kernel: the attention of a decode step, with RoPE and the KV cache."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.decoding.matmul import ready


@triton.jit
def _add_keys(q, k_s, v_s, seen, tops, weights, sums):
    """Running maxima and sums after BS more keys and values (BS, DP); only those `seen` count."""
    score = tl.where(seen, tl.sum(k_s * q[None, :], 1), -1e30)
    higher = tl.maximum(tops, score)
    old = tl.exp(tops - higher)
    p = tl.where(seen, tl.exp(score - higher), 0.0)
    return higher, weights * old + p, sums * old[:, None] + p[:, None] * v_s


@triton.jit(do_not_specialize=["T", "H", "G", "span"])
def attend_kernel(
    qkv, sin, cos, cache, part, edges, arrived, y, lengths, slots, T, H, G, span, scale,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    ROPE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, query head and span of keys: rotate q and k, store k and v in the cache (slot, 2, G, T, D), attend.

    H / G query heads share a head of keys and values. Each computes its new key; the first of them stores it, and none
    reads it from the cache in this step.

    Each of BS lanes has its own maximum and sums until all keys are processed, so no warp waits for another before
    that. If a row is longer than a span, the program that ends last combines the spans.

    EARLY: everything but qkv is read before the wait for it. This is allowed only after a matmul that waits before it
    lets this kernel start: then all kernels before that matmul are done, and lengths, slots and earlier tokens are
    final.
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not EARLY:
        ready(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    pos = tl.minimum(tl.load(lengths + slot), T - 1)
    start = split * span
    if start <= pos:
        d = tl.arange(0, DP)
        ok = d < D
        lane = tl.arange(0, BS)
        g = h * G // H
        keys = cache + (slot * 2 * G + g) * T * D
        values = cache + ((slot * 2 + 1) * G + g) * T * D
        end = tl.minimum(start + span, pos)
        first = start + lane
        if EARLY:
            where = (first < end)[:, None] & ok[None, :]
            k_s = tl.load(keys + first[:, None] * D + d[None, :], mask=where, other=0.0)
            v_s = tl.load(values + first[:, None] * D + d[None, :], mask=where, other=0.0)
        if ROPE:
            c = tl.load(cos + pos * (D // 2) + d // 2, mask=ok, other=0.0)
            s = tl.load(sin + pos * (D // 2) + d // 2, mask=ok, other=0.0)
            s = tl.where(d % 2 == 0, -s, s)
        if EARLY:
            ready(PDL)
        row = qkv + b * (H + 2 * G) * D
        at, at_key = row + h * D, row + (H + g) * D
        q = tl.load(at + d, mask=ok, other=0.0)
        key = tl.load(at_key + d, mask=ok, other=0.0)
        new = tl.load(at_key + G * D + d, mask=ok, other=0.0)
        if ROPE:
            q = q * c + tl.load(at + (d ^ 1), mask=ok, other=0.0) * s
            key = key * c + tl.load(at_key + (d ^ 1), mask=ok, other=0.0) * s
        q = q * scale
        tops = tl.full([BS], -1e30, tl.float32)
        weights = tl.zeros([BS], tl.float32)
        sums = tl.zeros([BS, DP], tl.float32)
        begin = start
        if EARLY:
            tops, weights, sums = _add_keys(q, k_s, v_s, first < end, tops, weights, sums)
            begin = start + BS
        for s0 in tl.range(begin, end, BS, num_stages=STAGES):
            position = s0 + lane
            seen = position < end
            where = seen[:, None] & ok[None, :]
            k_s = tl.load(keys + position[:, None] * D + d[None, :], mask=where, other=0.0)
            v_s = tl.load(values + position[:, None] * D + d[None, :], mask=where, other=0.0)
            tops, weights, sums = _add_keys(q, k_s, v_s, seen, tops, weights, sums)
        has_new = pos < start + span  # the new token belongs to this span
        score = tl.where(has_new, tl.sum(q * key, 0), -1e30)
        top = tl.maximum(tl.max(tops, 0), score)
        share = tl.exp(tops - top)
        p_new = tl.where(has_new, tl.exp(score - top), 0.0)
        weight = tl.sum(weights * share, 0) + p_new
        acc = tl.sum(sums * share[:, None], 0) + p_new * new
        if has_new and h * G % H == 0:
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
            tl.debug_barrier()  # all threads have stored before one reports it
            before = tl.atomic_add(arrived + b * H + h, 1, sem="acq_rel", scope="gpu")
            if before == parts - 1:
                tl.store(arrived + b * H + h, 0)
                j = tl.arange(0, SPLITS)
                used = j < parts
                m_j = tl.load(edges + (mine + j) * 2, mask=used, other=-1e30, cache_modifier=".cg")
                w_j = tl.load(edges + (mine + j) * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
                o_j = tl.load(
                    part + (mine + j)[:, None] * D + d[None, :],
                    mask=used[:, None] & ok[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                rescale = tl.exp(m_j - tl.max(m_j, 0))
                tl.store(to, tl.sum(o_j * rescale[:, None], 0) / tl.sum(w_j * rescale, 0), mask=ok)
