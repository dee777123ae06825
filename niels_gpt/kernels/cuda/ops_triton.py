"""Triton kernels for training on CUDA in bfloat16; `ops.py` makes operators of them.

Each makes one pass over memory where compiled torch makes two or three, or uses cheaper arithmetic: RoPE on interleaved
pairs, and activations with an erf that costs one exponential. All work by rows without atomics, so the same input gives
the same bits. With FP8 they write their results in FP8, for the matmul that follows (`kernels/fp8`).
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotated(x, sin, cos):
    """x (rows, D) with its pairs rotated by angles (rows or 1, D / 2)."""
    a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (x.shape[0], x.shape[1]))


@triton.jit
def rope_kernel(
    qkv, q, k, v, sin, cos, n, H, G, D, HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """One token of qkv (B n, H + 2 G, D): rotated q (B n, H, D) and k (B n, G, D), and with VALUES a copy of v."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    inside = (heads < H) & (lanes < D)
    shared = (heads < G) & (lanes < D)
    offset = heads * D + lanes
    half = tl.arange(0, WIDTH // 2)[None, :]
    angle = (token % n) * (D // 2) + half
    s = tl.load(sin + angle, mask=half < D // 2, other=0.0)
    c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
    source = qkv + token * (H + 2 * G) * D + offset
    target = token * G * D + offset
    kind = q.dtype.element_ty
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(q + token * H * D + offset, rotated(x, s, c).to(kind), mask=inside)
    x = tl.load(source + H * D, mask=shared, other=0.0).to(tl.float32)
    tl.store(k + target, rotated(x, s, c).to(kind), mask=shared)
    if VALUES:
        tl.store(v + target, tl.load(source + (H + G) * D, mask=shared, other=0.0), mask=shared)


@triton.jit
def rope_backward_kernel(
    dq, dk, dv, dqkv, scales, sin, cos, n, H, G, D,
    qb, qn, qh, kb, kn, kh, vb, vn, vh,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token of dqkv (B n, H + 2 G, D) from gradients with any strides (b, n, h) and contiguous lanes."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // n, token % n
    heads = tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    inside = (heads < H) & (lanes < D)
    shared = (heads < G) & (lanes < D)
    offset = token * (H + 2 * G) * D + heads * D + lanes
    x = tl.load(dq + row * qb + position * qn + heads * qh + lanes, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(dk + row * kb + position * kn + heads * kh + lanes, mask=shared, other=0.0).to(tl.float32)
    z = tl.load(dv + row * vb + position * vn + heads * vh + lanes, mask=shared, other=0.0).to(tl.float32)
    if ROPE:
        half = tl.arange(0, WIDTH // 2)[None, :]
        angle = position * (D // 2) + half
        s = -tl.load(sin + angle, mask=half < D // 2, other=0.0)  # rotate back
        c = tl.load(cos + angle, mask=half < D // 2, other=0.0)
        x = rotated(x, s, c)
        y = rotated(y, s, c)
    if FP8:
        amax = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        scale, inverse = power_of_two_scale(tl.max(tl.max(amax, 1), 0))
        tl.store(scales + token, scale)
        x *= inverse
        y *= inverse
        z *= inverse
    kind = dqkv.dtype.element_ty
    tl.store(dqkv + offset, x.to(kind), mask=inside)
    tl.store(dqkv + offset + H * D, y.to(kind), mask=shared)
    tl.store(dqkv + offset + (H + G) * D, z.to(kind), mask=shared)


@triton.jit
def power_of_two_scale(amax):
    """(scale, 1 / scale): the smallest power of two that maps [-amax, amax] into -448..448, the range of FP8."""
    bits = (tl.maximum(amax, 1e-30) / 448.0).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000  # round up to the next exponent
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x):
    """1 / x by the hardware's approximation, accurate to the last bit but one."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _normal_cdf_and_density(x):
    """(Phi(x), phi(x)) of the standard normal distribution, by Abramowitz and Stegun 7.1.26: accurate to 1e-7.

    The coefficients are halved, the exponential is a power of two and the reciprocal is the hardware's: the formula as
    printed would make a GELU a tenth slower than its memory traffic.
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
        return x * _normal_cdf_and_density(x)[0]


@triton.jit
def activation_gradients(g, x, GATED: tl.constexpr, up):
    """The gradients of x and, if GATED, of up, for the gradient g of `activated`."""
    if GATED:
        sigmoid = _inverse(1.0 + tl.exp2(-LOG2E * x))
        g *= sigmoid
        return g * up * (1.0 + x * (1.0 - sigmoid)), g * x
    else:
        cdf, density = _normal_cdf_and_density(x)
        return g * (cdf + x * density), g


@triton.jit
def activation_kernel(x, y, F, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """One row: y = x Phi(x); GATED: y = silu(gate) up, for x = gate and up, concatenated."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < F
    width = 2 * F if GATED else F
    u = tl.load(x + row * width + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * width + F + lanes, mask=inside, other=0.0).to(tl.float32) if GATED else u
    tl.store(y + row * F + lanes, activated(u, GATED, up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(dy, x, dx, F, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """One row: dx = dy (Phi(x) + x phi(x)); GATED: the gradients of gate and up, concatenated."""
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
