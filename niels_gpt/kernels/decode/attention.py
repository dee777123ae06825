"""The attention of a decode step; see `decode_kernels.py`."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.decode.matmul import ready


@triton.jit
def _see(q, k_s, v_s, seen, tops, weights, sums):
    """Maxima and sums after BS more keys and values (BS, DP), of which only those seen count."""
    score = tl.where(seen, tl.sum(k_s * q[None, :], 1), -1e30)
    higher = tl.maximum(tops, score)
    old = tl.exp(tops - higher)
    p = tl.where(seen, tl.exp(score - higher), 0.0)
    return higher, weights * old + p, sums * old[:, None] + p[:, None] * v_s


@triton.jit(do_not_specialize=["T", "H", "span"])
def attend_kernel(
    qkv, sin, cos, cache, part, edges, arrived, y, lengths, slots, T, H, span, scale,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    ROPE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, head and span of keys: turns q and k, stores k and v, attends.

    Every lane of BS keys has a maximum and sums of its own until all keys are seen: no warp waits for another before.
    A row that is longer than a span is put together by the program that ends last. cache: (slot, 2, H, T, D).

    EARLY: all but qkv is read before the wait for it. Only after a product that waits before it lets this kernel come
    up: then all that was launched before that product is done, so lengths, slots and earlier tokens are final.
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
        keys = cache + (slot * 2 * H + h) * T * D
        values = cache + ((slot * 2 + 1) * H + h) * T * D
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
        at = qkv + b * 3 * H * D + h * D
        q = tl.load(at + d, mask=ok, other=0.0)
        key = tl.load(at + H * D + d, mask=ok, other=0.0)
        new = tl.load(at + 2 * H * D + d, mask=ok, other=0.0)
        if ROPE:
            q = q * c + tl.load(at + (d ^ 1), mask=ok, other=0.0) * s
            key = key * c + tl.load(at + H * D + (d ^ 1), mask=ok, other=0.0) * s
        q = q * scale
        tops = tl.full([BS], -1e30, tl.float32)
        weights = tl.zeros([BS], tl.float32)
        sums = tl.zeros([BS, DP], tl.float32)
        begin = start
        if EARLY:
            tops, weights, sums = _see(q, k_s, v_s, first < end, tops, weights, sums)
            begin = start + BS
        for s0 in tl.range(begin, end, BS, num_stages=STAGES):
            place = s0 + lane
            seen = place < end
            where = seen[:, None] & ok[None, :]
            k_s = tl.load(keys + place[:, None] * D + d[None, :], mask=where, other=0.0)
            v_s = tl.load(values + place[:, None] * D + d[None, :], mask=where, other=0.0)
            tops, weights, sums = _see(q, k_s, v_s, seen, tops, weights, sums)
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
