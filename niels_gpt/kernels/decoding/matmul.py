"""Triton kernels: the matmuls of a decode step, with the norm before and the activation or addition after them."""

# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton's language is not Python's (it has no (*a, b)), and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOW = tl.constexpr(2048.0)
"""Factor of the second float16 of a pair, which gives it the range of the first; the same as step.LOW."""
ROUNDING = tl.constexpr(2.0**-20)
"""Relative rounding error of a mean square."""


@triton.jit
def ready(PDL: tl.constexpr):
    """Wait until the previous kernel is done, then let the next one start: at most two share the device."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _activated(value, epilogue):
    """GELU(value) if epilogue is 1, else value."""
    if epilogue == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def vector_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: out = epilogue(w norm(x)), BN of the N rows of w (N, K) per program.

    norm: 0 none, 1 LayerNorm, 2 RMSNorm; both need K <= BK, and their weight is part of w. epilogue: 0 store, 1 GELU,
    2 SwiGLU (rows of up and gate alternate in w), 3 add to out.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    lanes = tl.arange(0, BK)
    at = w + n[:, None] * K + lanes[None, :]
    inside = (n < N)[:, None]
    if PDL:
        gdc_launch_dependents()
    # Weights depend on no kernel: load them while the last one ends.
    w_k = tl.load(at, mask=inside & (lanes < K)[None, :], other=0.0)
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
    """The partial sums of x and x^2 that a norm of the rows b needs, from moments (row, part, 2)."""
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
    """(mean, 1 / standard deviation) of each row, from `_moments`. The variance is at least its rounding error."""
    total, square = tl.reduce((sums, squares), 1, _add_both)
    mean = total / K
    square = square / K
    variance = tl.maximum(square - mean * mean, square * ROUNDING)
    return mean, tl.where(norm > 0, 1.0 / tl.sqrt(variance + eps), 1.0)


@triton.jit
def _residual(out, b, n, N, rows, epilogue):
    """The residual stream that a matmul is added to (epilogue 3); else 0."""
    where = (b < tl.where(epilogue == 3, rows, 0))[:, None] & (n < N)[None, :]
    return tl.load(out + b[:, None] * N + n[None, :], mask=where, other=0.0)


@triton.jit
def _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M: tl.constexpr, BN: tl.constexpr):
    """Apply the epilogue to a matmul (M, BN), to which the residual is already added, and store it."""
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
    """Keep the value in a register from here on.

    Otherwise the compiler hoists its shared-memory round trip, and so the wait for it, above the load.
    """
    PACK: tl.constexpr = 32 // value.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=PACK)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def paired_kernel(
    x, w, factor, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M rows and BN columns of out = epilogue(norm(x) w^T) for x (rows, K), K <= SPLIT BK; else as vector_kernel.

    There is a norm and no addition: |norm(x)| <= sqrt(K) fits float16 for any x. w (2, N, K) and factor (N) are pairs
    of float16 from `Weights.paired`; x is split into such pairs here. Each of SPLIT warps has its own piece of K, and
    all loads are issued before the first is used. moments: partial sums over x. The kernel waits before it lets the
    next one start: attend_kernel relies on that.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    factors = tl.load(factor + n, mask=n < N, other=0.0)  # loaded while the last kernel ends
    w_high = _weights(w, n, k, N, K)
    w_low = _weights(w + N * K, n, k, N, K)
    ready(PDL)
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


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def wide_kernel(
    x, w, factor, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As paired_kernel, for any K and a large N: larger tiles read x less often. It only stores; epilogue is ignored.

    All warps share a tile and step through K together. The next kernel must not read before it has waited.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    factors = tl.load(factor + n, mask=n < N, other=0.0)
    x_at = x + b[:, None] * K + k[None, :]
    w_at = w + n[None, :] * K + k[:, None]
    if PDL:
        gdc_wait()
    sums, squares = _moments(moments, b, rows, parts, norm, PARTS)
    mean, scale = _mean_and_scale(sums, squares, K, eps, norm)
    acc = tl.zeros([M, BN], tl.float32)
    cross = tl.zeros([M, BN], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        ok = k < K - k0
        inside = ok[:, None] & (n < N)[None, :]
        value = tl.load(x_at + k0, mask=ok[None, :] & (b < rows)[:, None], other=0.0)
        w_high = tl.load(w_at + k0, mask=inside, other=0.0)
        w_low = tl.load(w_at + k0 + N * K, mask=inside, other=0.0)
        value = tl.where(ok[None, :], (value - mean[:, None]) * scale[:, None], 0.0)
        high = value.to(tl.float16)
        low = ((value - high.to(tl.float32)) * LOW).to(tl.float16)
        cross = tl.dot(low, w_high, cross)
        cross = tl.dot(high, w_low, cross)
        acc = tl.dot(high, w_high, acc)
    result = (acc + cross * (1.0 / LOW)) * factors[None, :]
    tl.store(out + b[:, None] * N + n[None, :], result, mask=(b < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _rounded(value):
    """value rounded to tf32, which lacks the last 13 bits of float32."""
    return ((value.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)).to(tl.float32, bitcast=True)


@triton.jit
def _three_matmuls(value, weight):
    """value (SPLIT, M, BK) times weight (SPLIT, BK, BN), both float32, as sums of two tf32 numbers."""
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

    moments: after an addition the sums over out are written, one part per BN columns.
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
    acc = _three_matmuls(values[0], weights[0])
    for piece in tl.static_range(1, PIECES):
        acc += _three_matmuls(values[piece], weights[piece])
    result = tl.sum(acc, 0) + _not_before(residual)
    _finish(result, out, moments, b, tile, N, rows, parts, epilogue, M, BN)


@triton.jit(do_not_specialize=["N", "rows", "parts", "norm", "epilogue"])
def deep_kernel(
    x, w, shift, out, moments, N, K, rows, parts, eps, norm, epilogue,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As lean_kernel, for any K and also after a norm: each of SPLIT warps takes every SPLIT-th piece of K.

    With a norm it computes (w x - mean shift) scale, where shift holds the row sums of w. Like paired_kernel it waits
    before it lets the next kernel start.
    """
    b = tl.program_id(0) * M + tl.arange(0, M)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]  # (SPLIT, BK)
    x_at = x + b[None, :, None] * K + k[:, None, :]
    w_at = w + n[None, None, :] * K + k[:, :, None]
    ready(PDL)
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
