"""Triton kernels for training on CUDA in bfloat16; `fused.py` makes operators of them.

Each does in one pass over memory what a compiler's own kernels do in two or three, or with slower arithmetic:
the cross-entropy with its gradient in place, RoPE on interleaved pairs, and the activations with an erf that costs
one exponential. All work by rows without atomics, so that the same input gives the same bits. With EIGHT they write
what they made in FP8, for the products that come next (`fp8.py`).
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _four(base, start, lanes, V, width, BLOCK: tl.constexpr, INSIDE: tl.constexpr):
    """Four blocks of a row, one after the other in memory, in float32; -inf past V, which no INSIDE ones reach."""
    a, b, c, d = start + lanes, start + BLOCK + lanes, start + 2 * BLOCK + lanes, start + 3 * BLOCK + lanes
    if INSIDE:
        p, q, r, s = tl.load(base + a), tl.load(base + b), tl.load(base + c), tl.load(base + d)
        return p.to(tl.float32), q.to(tl.float32), r.to(tl.float32), s.to(tl.float32)
    low = -float("inf")
    # Masked by the padded width: by V, which need not be even, loads would not be 16 bytes wide.
    p = tl.where(a < V, tl.load(base + a, mask=a < width, other=low).to(tl.float32), low)
    q = tl.where(b < V, tl.load(base + b, mask=b < width, other=low).to(tl.float32), low)
    r = tl.where(c < V, tl.load(base + c, mask=c < width, other=low).to(tl.float32), low)
    s = tl.where(d < V, tl.load(base + d, mask=d < width, other=low).to(tl.float32), low)
    return p, q, r, s


@triton.jit
def _add_up(top, summed, p, q, r, s):
    """One more of each in the sums of 2^(x log2(e) - top), lane by lane; top is the largest x log2(e)."""
    higher = tl.maximum(top, tl.maximum(tl.maximum(p, q), tl.maximum(r, s)) * LOG2E)
    new = tl.exp2(p * LOG2E - higher) + tl.exp2(q * LOG2E - higher)
    new += tl.exp2(r * LOG2E - higher) + tl.exp2(s * LOG2E - higher)
    return higher, summed * tl.exp2(top - higher) + new


@triton.jit
def _put_share(base, place, x, normal, scale, width, INSIDE: tl.constexpr):
    share = tl.exp2(x * LOG2E - normal)
    tl.store(base + place, (share * scale).to(base.dtype.element_ty), mask=None if INSIDE else place < width)


@triton.jit
def cross_entropy_kernel(
    logits, gradients, targets, losses, total, V, width, BLOCK: tl.constexpr, EIGHT: tl.constexpr
):  # fmt: skip
    """One row: its loss, and the gradient of its logits divided by `total`; both 0 for a target < 0.

    Gradients may go where the logits were. With EIGHT they are not divided but times 2^15: between -2^15 and 2^15, in a
    type that ends at 57,344 and is exact to a quarter down to 2^-14.

    The row is read twice, the second time from a cache. Each lane keeps a maximum and a sum of its own, which meet only
    at the end, so that no thread waits for another in between. Arithmetic is what it costs beside memory: what ends
    before V is not masked, and the one that is subtracted at the target is subtracted there at last, not compared for
    everywhere. `width` is V filled up to a multiple of 64; what stands past V becomes 0.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    out = gradients + row * width
    y = tl.load(targets + row)
    counts = y >= 0
    y = tl.where(counts, y, 0)
    chosen = tl.load(base + y).to(tl.float32) * LOG2E  # before the sums, where threads meet: after them it may be gone
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
    normal = highest + tl.log2(tl.sum(summed * tl.exp2(top - highest), 0))
    chosen -= normal
    tl.store(losses + row, tl.where(counts, -chosen / LOG2E, 0.0))
    scale = tl.where(counts, 32768.0 if EIGHT else 1.0 / tl.load(total).to(tl.float32), 0.0)
    for start in range(0, inside, 4 * BLOCK):
        four = _four(base, start, lanes, V, width, BLOCK, True)
        for i in tl.static_range(4):
            _put_share(out, start + i * BLOCK + lanes, four[i], normal, scale, width, True)
    for start in range(inside, width, 4 * BLOCK):
        four = _four(base, start, lanes, V, width, BLOCK, False)
        for i in tl.static_range(4):
            _put_share(out, start + i * BLOCK + lanes, four[i], normal, scale, width, False)
    tl.debug_barrier()  # after the share that another thread has put there
    tl.store(out + y, ((tl.exp2(chosen) - 1.0) * scale).to(out.dtype.element_ty))


@triton.jit
def turned(x, sin, cos):
    """Pairs of x (rows, D) turned by angles (rows or 1, D / 2)."""
    a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (x.shape[0], x.shape[1]))


@triton.jit
def rope_kernel(
    qkv, q, k, v, sin, cos, n, H, D, HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """One token of qkv (B n, 3, H, D): q and k turned, and with VALUES v as it is, into (B n, H, D) each."""
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
    tl.store(q + target, turned(x, s, c).to(kind), mask=inside)
    x = tl.load(source + H * D, mask=inside, other=0.0).to(tl.float32)
    tl.store(k + target, turned(x, s, c).to(kind), mask=inside)
    if VALUES:
        tl.store(v + target, tl.load(source + 2 * H * D, mask=inside, other=0.0), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, dqkv, scales, sin, cos, n, H, D,
    qb, qn, qh, kb, kn, kh, vb, vn, vh,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURN: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """One token of dqkv (B n, 3, H, D) from gradients of any strides (b, n, h) whose lanes lie side by side."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // n, token % n
    heads = tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    inside = (heads < H) & (lanes < D)
    place = token * 3 * H * D + heads * D + lanes
    x = tl.load(dq + row * qb + position * qn + heads * qh + lanes, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(dk + row * kb + position * kn + heads * kh + lanes, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(dv + row * vb + position * vn + heads * vh + lanes, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        half = tl.arange(0, WIDTH // 2)[None, :]
        angle = position * (D // 2) + half
        s = -tl.load(sin + angle, mask=half < D // 2, other=0.0)  # the other way round
        c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
        x = turned(x, s, c)
        y = turned(y, s, c)
    if EIGHT:
        top = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        scale, inverse = power_of(tl.max(tl.max(top, 1), 0))
        tl.store(scales + token, scale)
        x *= inverse
        y *= inverse
        z *= inverse
    kind = dqkv.dtype.element_ty
    tl.store(dqkv + place, x.to(kind), mask=inside)
    tl.store(dqkv + place + H * D, y.to(kind), mask=inside)
    tl.store(dqkv + place + 2 * H * D, z.to(kind), mask=inside)


@triton.jit
def power_of(top):
    """(scale, 1 / scale) of a row whose largest element is `top`: a power of two with which it is at most 448."""
    bits = (tl.maximum(top, 1e-30) / 448.0).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000  # up to the next exponent
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x):
    """1 / x to the last bit but one."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _normal_parts(x):
    """The standard normal distribution at x: (up to x, its density). Abramowitz and Stegun 7.1.26: to 1e-7.

    The formula's numbers are halved here, its exponential is a power of two and its reciprocal the hardware's: with
    all that as it is written there, a GELU would take a tenth longer than memory does.
    """
    bell = tl.exp2(-0.7213475204444817 * x * x)
    t = _inverse(1.0 + 0.23164189 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
    return tl.where(x >= 0, 1.0 - tail, tail), 0.3989422804 * bell


@triton.jit
def activated(x, GATED: tl.constexpr, up):
    """x Phi(x); GATED: silu(x) up."""
    if GATED:
        return x * _inverse(1.0 + tl.exp2(-LOG2E * x)) * up
    else:
        return x * _normal_parts(x)[0]


@triton.jit
def activation_gradients(g, x, GATED: tl.constexpr, up):
    """The gradients of x and, GATED, of up, where that of `activated` is g."""
    if GATED:
        share = _inverse(1.0 + tl.exp2(-LOG2E * x))
        g *= share
        return g * up * (1.0 + x * (1.0 - share)), g * x
    else:
        below, density = _normal_parts(x)
        return g * (below + x * density), g


@triton.jit
def activation_kernel(x, y, F, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """One row: y = x Phi(x); GATED: y = silu(gate) up, for x = gate, up side by side."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < F
    width = 2 * F if GATED else F
    u = tl.load(x + row * width + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * width + F + lanes, mask=inside, other=0.0).to(tl.float32) if GATED else u
    tl.store(y + row * F + lanes, activated(u, GATED, up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(dy, x, dx, F, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """One row: dx = dy (Phi(x) + x phi(x)); GATED: the gradients of gate and up, side by side."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < F
    width = 2 * F if GATED else F
    g = tl.load(dy + row * F + lanes, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + row * width + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * width + F + lanes, mask=inside, other=0.0).to(tl.float32) if GATED else u
    first, second = activation_gradients(g, u, GATED, up)
    tl.store(dx + row * width + lanes, first.to(dx.dtype.element_ty), mask=inside)
    if GATED:
        tl.store(dx + row * width + F + lanes, second.to(dx.dtype.element_ty), mask=inside)
