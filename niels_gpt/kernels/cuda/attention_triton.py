"""Triton kernels for causal attention with RoPE over short windows; `attention.py` makes an operator of them.

A program computes one head of one row: all its keys and values fit into shared memory, so qkv (B, n, 3, H, D) is read
once and rotated in registers, and nothing rotated is written. Loops over blocks are unrolled (n is a constant):
n <= 256. No atomics: the same input gives the same bits.

q is scaled by log2(e) / sqrt(D) while it is rotated, so that the softmax uses powers of two:
p = 2^(q' k - lse log2(e)), dk = ln(2) ds^T q', dq = ds k / sqrt(D).
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton's language is not Python's (it has no (*a, b)), and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl

from niels_gpt.kernels.cuda.ops_triton import LOG2E, rotated

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _pointers(base, row, BLOCK: tl.constexpr, stride, WIDTH: tl.constexpr, APART: tl.constexpr):
    """Pointers to WIDTH lanes of BLOCK rows from `row` on. APART: blocks share registers, except for their start."""
    rows, lanes = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    if APART:
        return base + row * stride + (rows * stride + lanes)
    return base + ((row + rows) * stride + lanes)


@triton.jit
def _block(
    base, row, BLOCK: tl.constexpr, stride, N: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr = False
):  # fmt: skip
    """The block at these pointers; 0 past N."""
    inside = row + tl.arange(0, BLOCK)[:, None] < N
    return tl.load(_pointers(base, row, BLOCK, stride, WIDTH, APART), mask=inside, other=0.0)


@triton.jit
def _store_block(
    base, row, BLOCK: tl.constexpr, stride, x, N: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr = False
):  # fmt: skip
    inside = row + tl.arange(0, BLOCK)[:, None] < N
    tl.store(_pointers(base, row, BLOCK, stride, WIDTH, APART), x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _angles(sin, cos, row, BLOCK: tl.constexpr, N: tl.constexpr, D: tl.constexpr, APART: tl.constexpr = False):
    return _block(sin, row, BLOCK, D // 2, N, D // 2, APART), _block(cos, row, BLOCK, D // 2, N, D // 2, APART)


@triton.jit
def _vector(base, row, BLOCK: tl.constexpr, N: tl.constexpr, other):
    return tl.load(base + (row + tl.arange(0, BLOCK)), mask=row + tl.arange(0, BLOCK) < N, other=other)


@triton.jit
def _store_vector(base, row, BLOCK: tl.constexpr, x, N: tl.constexpr):
    tl.store(base + (row + tl.arange(0, BLOCK)), x, mask=row + tl.arange(0, BLOCK) < N)


@triton.jit
def forward_kernel(
    qkv, sin, cos, y, lse, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y (B, n, H, D) and lse (B, H, n), the logarithm of the softmax's sum."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    source = qkv + b * (N * 3 * H * D) + h * D
    ks, vs = (), ()
    for i in tl.static_range((N + BLOCK - 1) // BLOCK):
        row = i * BLOCK
        q = _block(source, row, BLOCK, 3 * H * D, N, D)
        k = _block(source + H * D, row, BLOCK, 3 * H * D, N, D)
        vs = vs + (_block(source + 2 * H * D, row, BLOCK, 3 * H * D, N, D),)
        s, c = _angles(sin, cos, row, BLOCK, N, D)
        ks = ks + (rotated(k.to(tl.float32), s, c).to(k.dtype),)
        q = rotated(q.to(tl.float32) * (LOG2E * D**-0.5), s, c).to(q.dtype)
        top = tl.full((BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        out = tl.zeros((BLOCK, D), tl.float32)
        for j in tl.static_range(i + 1):
            score = tl.dot(q, tl.trans(ks[j]))
            if j == i:
                at = row + tl.arange(0, BLOCK)  # not from 0: a mask common to all blocks would stay in registers
                score = tl.where(at[:, None] >= at[None, :], score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            p = tl.exp2(score - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            out = tl.dot(p.to(q.dtype), vs[j], out * shrink[:, None])
            top = higher
        _store_block(y + b * (N * H * D) + h * D, row, BLOCK, H * D, out / total[:, None], N, D)
        _store_vector(lse + head * N, row, BLOCK, (top + tl.log2(total)) * LN2, N)


@triton.jit
def backward_kernel(
    qkv, sin, cos, y, lse, dy, dqkv, deltas, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dqkv (B, n, 3, H, D) from dy (B, n, H, D). deltas (B, H, n) is scratch memory for the sums over dy y.

    The loop goes from the last block of keys to the first, each against all blocks of queries that see it: dq of every
    block stays in registers until the end, q and dy in shared memory. Scores are (keys, queries), so that p and ds are
    the left operands of dv and dk, directly from registers. lse and delta are loaded where they are used: keeping one
    number per column would take as many registers as a block of q.
    """
    LAST: tl.constexpr = (N + BLOCK - 1) // BLOCK - 1
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    source = qkv + b * (N * 3 * H * D) + h * D
    target = dqkv + b * (N * 3 * H * D) + h * D
    across = b * (N * H * D) + h * D
    lse += head * N
    deltas += head * N
    qs, gs, dqs = (), (), ()  # from the last block to the first
    for done in tl.static_range(LAST + 1):
        col = (LAST - done) * BLOCK
        k = _block(source + H * D, col, BLOCK, 3 * H * D, N, D, True)
        v = _block(source + 2 * H * D, col, BLOCK, 3 * H * D, N, D, True)
        s, c = _angles(sin, cos, col, BLOCK, N, D, True)
        q = _block(source, col, BLOCK, 3 * H * D, N, D, True)
        g = _block(dy + across, col, BLOCK, H * D, N, D, True)
        out = _block(y + across, col, BLOCK, H * D, N, D, True)
        q = rotated(q.to(tl.float32) * (LOG2E * D**-0.5), s, c).to(q.dtype)
        _store_vector(deltas, col, BLOCK, tl.sum(g.to(tl.float32) * out.to(tl.float32), 1), N)
        qs, gs, dqs = qs + (q,), gs + (g,), dqs + (tl.zeros((BLOCK, D), tl.float32),)
        k = rotated(k.to(tl.float32), s, c).to(k.dtype)
        tl.debug_barrier()  # threads read deltas that other threads wrote
        dk = tl.zeros((BLOCK, D), tl.float32)
        dv = tl.zeros((BLOCK, D), tl.float32)
        for t in tl.static_range(done + 1):
            row = (LAST - t) * BLOCK
            low = _vector(lse, row, BLOCK, N, float("inf")) * LOG2E  # past N: p = 0
            p = tl.exp2(tl.dot(k, tl.trans(qs[t])) - low[None, :])
            if t == done:
                at = row + tl.arange(0, BLOCK)
                p = tl.where(at[None, :] >= at[:, None], p, 0.0)
            dv = tl.dot(p.to(q.dtype), gs[t], dv)
            delta = _vector(deltas, row, BLOCK, N, 0.0)
            ds = (p * (tl.dot(v, tl.trans(gs[t])) - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, qs[t], dk)
            dq = tl.dot(tl.trans(ds), k, dqs[t])
            dqs = dqs[:t] + (dq,) + dqs[t + 1 :]
            if done == LAST:
                s, c = _angles(sin, cos, row, BLOCK, N, D, True)
                _store_block(target, row, BLOCK, 3 * H * D, rotated(dq * D**-0.5, -s, c), N, D, True)
        s, c = _angles(sin, cos, col, BLOCK, N, D, True)
        _store_block(target + H * D, col, BLOCK, 3 * H * D, rotated(dk * LN2, -s, c), N, D, True)
        _store_block(target + 2 * H * D, col, BLOCK, 3 * H * D, dv, N, D, True)
