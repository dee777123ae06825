"""Triton kernel of the cross-entropy and its gradient, in place; `cross_entropy.py` makes an operator of it."""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _four(base, start, lanes, V, width, BLOCK: tl.constexpr, INSIDE: tl.constexpr):
    """Four consecutive blocks of a row, in float32; -inf past V, which INSIDE blocks do not reach."""
    a, b, c, d = start + lanes, start + BLOCK + lanes, start + 2 * BLOCK + lanes, start + 3 * BLOCK + lanes
    if INSIDE:
        p, q, r, s = tl.load(base + a), tl.load(base + b), tl.load(base + c), tl.load(base + d)
        return p.to(tl.float32), q.to(tl.float32), r.to(tl.float32), s.to(tl.float32)
    low = -float("inf")
    # The mask is the padded width: with V, which may be odd, loads would not be 16 bytes wide.
    p = tl.where(a < V, tl.load(base + a, mask=a < width, other=low).to(tl.float32), low)
    q = tl.where(b < V, tl.load(base + b, mask=b < width, other=low).to(tl.float32), low)
    r = tl.where(c < V, tl.load(base + c, mask=c < width, other=low).to(tl.float32), low)
    s = tl.where(d < V, tl.load(base + d, mask=d < width, other=low).to(tl.float32), low)
    return p, q, r, s


@triton.jit
def _add_up(top, summed, p, q, r, s):
    """Add four more logits per lane to the sums of 2^(x log2(e) - top); top is the largest x log2(e) of the lane."""
    higher = tl.maximum(top, tl.maximum(tl.maximum(p, q), tl.maximum(r, s)) * LOG2E)
    new = tl.exp2(p * LOG2E - higher) + tl.exp2(q * LOG2E - higher)
    new += tl.exp2(r * LOG2E - higher) + tl.exp2(s * LOG2E - higher)
    return higher, summed * tl.exp2(top - higher) + new


@triton.jit
def _store_probability(base, offset, x, log_sum, scale, width, INSIDE: tl.constexpr):
    p = tl.exp2(x * LOG2E - log_sum)
    tl.store(base + offset, (p * scale).to(base.dtype.element_ty), mask=None if INSIDE else offset < width)


@triton.jit
def cross_entropy_kernel(
    logits, gradients, targets, losses, total, V, width, BLOCK: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """One row: its loss, and the gradient of its logits divided by `total`; both 0 for a target < 0.

    `gradients` may be the memory of `logits`. With FP8 they are multiplied by 2^15 instead of divided by `total`: they
    are then in -2^15..2^15, in a type (e5m2) that ends at 57,344 and has a relative error of a quarter down to 2^-14.

    The row is read twice, the second time from the L2 cache. Each lane has its own maximum and sum, combined only at
    the end, so that no thread waits for another in between. The kernel is bound by arithmetic as much as by memory:
    blocks that end before V are not masked, and the 1 is subtracted from the target's probability in one store at the
    end instead of by a comparison for every logit. `width` is V padded to a multiple of 64; logits past V become 0.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    out = gradients + row * width
    y = tl.load(targets + row)
    counted = y >= 0
    y = tl.where(counted, y, 0)
    chosen = tl.load(base + y).to(tl.float32) * LOG2E  # read before the reductions: the row is overwritten after them
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    inside = V // (4 * BLOCK) * (4 * BLOCK)
    for start in range(0, inside, 4 * BLOCK):
        p, q, r, s = _four(base, start, lanes, V, width, BLOCK, True)
        top, summed = _add_up(top, summed, p, q, r, s)
    for start in range(inside, width, 4 * BLOCK):
        p, q, r, s = _four(base, start, lanes, V, width, BLOCK, False)
        top, summed = _add_up(top, summed, p, q, r, s)
    highest = tl.max(top, 0)
    log_sum = highest + tl.log2(tl.sum(summed * tl.exp2(top - highest), 0))
    chosen -= log_sum
    tl.store(losses + row, tl.where(counted, -chosen / LOG2E, 0.0))
    scale = tl.where(counted, 32768.0 if FP8 else 1.0 / tl.load(total).to(tl.float32), 0.0)
    for start in range(0, inside, 4 * BLOCK):
        four = _four(base, start, lanes, V, width, BLOCK, True)
        for i in tl.static_range(4):
            _store_probability(out, start + i * BLOCK + lanes, four[i], log_sum, scale, width, True)
    for start in range(inside, width, 4 * BLOCK):
        four = _four(base, start, lanes, V, width, BLOCK, False)
        for i in tl.static_range(4):
            _store_probability(out, start + i * BLOCK + lanes, four[i], log_sum, scale, width, False)
    tl.debug_barrier()  # another thread stored the probability of the target: write after it
    tl.store(out + y, ((tl.exp2(chosen) - 1.0) * scale).to(out.dtype.element_ty))
