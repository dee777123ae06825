"""Triton kernels for training on CUDA in bfloat16; `fused.py` makes operators of them.

Each does in one pass over memory what a compiler's own kernels do in two or three, or with slower arithmetic:
the cross-entropy with its gradient in place, RoPE on interleaved pairs, and the activations with an erf that costs
one exponential. All work by rows or elements without atomics, so that the same input gives the same bits.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _four(base, start, lanes, V, width, BLOCK: tl.constexpr):
    """Four blocks of a row, one after the other in memory, in float32; -inf past V."""
    a, b, c, d = start + lanes, start + BLOCK + lanes, start + 2 * BLOCK + lanes, start + 3 * BLOCK + lanes
    low = -float("inf")
    # Masked by the padded width: by V, which need not be even, loads would not be 16 bytes wide.
    p = tl.where(a < V, tl.load(base + a, mask=a < width, other=low).to(tl.float32), low)
    q = tl.where(b < V, tl.load(base + b, mask=b < width, other=low).to(tl.float32), low)
    r = tl.where(c < V, tl.load(base + c, mask=c < width, other=low).to(tl.float32), low)
    s = tl.where(d < V, tl.load(base + d, mask=d < width, other=low).to(tl.float32), low)
    return p, q, r, s


@triton.jit
def _store_gradient(base, place, x, y, normal, scale, width):
    gradient = (tl.exp(x - normal) - tl.where(place == y, 1.0, 0.0)) * scale
    tl.store(base + place, gradient.to(base.dtype.element_ty), mask=place < width)


@triton.jit
def cross_entropy_kernel(logits, targets, losses, total, V, width, BLOCK: tl.constexpr):
    """One row: its loss, and in place of the logits their gradient divided by `total`; both 0 for a target < 0.

    The row is read twice, the second time from a cache. Each lane keeps a maximum and a sum of its own, which meet only
    at the end, so that no thread waits for another in between. `width` is V filled up to a multiple of 64; what
    stands past V becomes 0.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    y = tl.load(targets + row)
    counts = y >= 0
    y = tl.where(counts, y, 0)
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, 4 * BLOCK):
        p, q, r, s = _four(base, start, lanes, V, width, BLOCK)
        higher = tl.maximum(top, tl.maximum(tl.maximum(p, q), tl.maximum(r, s)))
        new = tl.exp(p - higher) + tl.exp(q - higher) + tl.exp(r - higher) + tl.exp(s - higher)
        summed = summed * tl.exp(top - higher) + new
        top = higher
    highest = tl.max(top, 0)
    normal = highest + tl.log(tl.sum(summed * tl.exp(top - highest), 0))
    chosen = tl.load(base + y).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normal - chosen, 0.0))
    scale = tl.where(counts, 1.0 / tl.load(total).to(tl.float32), 0.0)
    for start in range(0, width, 4 * BLOCK):
        p, q, r, s = _four(base, start, lanes, V, width, BLOCK)
        _store_gradient(base, start + lanes, p, y, normal, scale, width)
        _store_gradient(base, start + BLOCK + lanes, q, y, normal, scale, width)
        _store_gradient(base, start + 2 * BLOCK + lanes, r, y, normal, scale, width)
        _store_gradient(base, start + 3 * BLOCK + lanes, s, y, normal, scale, width)


@triton.jit
def _turned(x, sin, cos, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Pairs of (HEADS, WIDTH) turned by angles (1, WIDTH / 2)."""
    a, b = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (HEADS, WIDTH))


@triton.jit
def rope_kernel(qkv, q, k, v, sin, cos, n, H, D, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """One token of qkv (B n, 3, H, D): q and k turned and v as it is, into (B n, H, D) each."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    inside = (heads < H) & (lanes < D)
    place = heads * D + lanes
    half = tl.arange(0, WIDTH // 2)[None, :]
    angle = (token % n) * (D // 2) + half
    s = tl.load(sin + angle, mask=half < D // 2, other=0.0)
    c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
    source = qkv + token * 3 * H * D + place
    target = token * H * D + place
    kind = q.dtype.element_ty
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(q + target, _turned(x, s, c, HEADS, WIDTH).to(kind), mask=inside)
    x = tl.load(source + H * D, mask=inside, other=0.0).to(tl.float32)
    tl.store(k + target, _turned(x, s, c, HEADS, WIDTH).to(kind), mask=inside)
    tl.store(v + target, tl.load(source + 2 * H * D, mask=inside, other=0.0), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, dqkv, sin, cos, n, H, D,
    qb, qn, qh, kb, kn, kh, vb, vn, vh,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token of dqkv (B n, 3, H, D) from gradients of any strides (b, n, h) whose lanes lie side by side."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // n, token % n
    heads = tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    inside = (heads < H) & (lanes < D)
    half = tl.arange(0, WIDTH // 2)[None, :]
    angle = position * (D // 2) + half
    s = -tl.load(sin + angle, mask=half < D // 2, other=0.0)  # the other way round
    c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
    target = dqkv + token * 3 * H * D + heads * D + lanes
    kind = dqkv.dtype.element_ty
    x = tl.load(dq + row * qb + position * qn + heads * qh + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, _turned(x, s, c, HEADS, WIDTH).to(kind), mask=inside)
    x = tl.load(dk + row * kb + position * kn + heads * kh + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + H * D, _turned(x, s, c, HEADS, WIDTH).to(kind), mask=inside)
    x = tl.load(dv + row * vb + position * vn + heads * vh + lanes, mask=inside, other=0.0)
    tl.store(target + 2 * H * D, x.to(kind), mask=inside)


@triton.jit
def _normal_parts(x):
    """The standard normal distribution at x: (up to x, its density). Abramowitz and Stegun 7.1.26: to 1e-7."""
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 * 0.70710678 * tl.abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * bell
    return tl.where(x >= 0, 1.0 - 0.5 * tail, 0.5 * tail), 0.3989422804 * bell


@triton.jit
def gelu_kernel(x, y, number, BLOCK: tl.constexpr):
    """y = x Phi(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    u = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    below, _ = _normal_parts(u)
    tl.store(y + place, (u * below).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gelu_backward_kernel(dy, x, dx, number, BLOCK: tl.constexpr):
    """dx = dy (Phi(x) + x phi(x))."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    u = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    below, density = _normal_parts(u)
    tl.store(dx + place, (g * (below + u * density)).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(x, y, F, BLOCK: tl.constexpr):
    """A piece of one row: y = silu(gate) up, for x = gate, up side by side."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < F
    gate = tl.load(x + row * 2 * F + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + place, (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(dy, x, dx, F, BLOCK: tl.constexpr):
    """A piece of one row of the gradients of gate and up, side by side."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < F
    gate = tl.load(x + row * 2 * F + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * F + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    kind = dx.dtype.element_ty
    tl.store(dx + row * 2 * F + place, (g * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
    tl.store(dx + row * 2 * F + F + place, (g * gate * share).to(kind), mask=inside)
