"""Triton kernel for the matmuls of Muon on CUDA; `training/optim/muon.py` explains them.

cuBLAS copies the matrix that is added to a matmul, and computes both halves of a symmetric result: this kernel copies
nothing and writes one half twice. Its blocks do not wait for each other either, unlike the clusters of eight with which
cuBLAS 13.1 multiplies stacks of 512 x 512, which fail if processes share a GPU.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it is not installed where there is no CUDA.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a, b, added, out, M, N, K, a_stack, a_row, b_stack, b_row, b_column, alpha, beta,
    ADDED: tl.constexpr, SYMMETRIC: tl.constexpr, EVEN: tl.constexpr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile, SIDE by SIDE, of alpha a b + beta added, for stacks a (k, M, K), b (k, K, N), added and out (k, M, N).

    Rows of a are contiguous, as are added and out. SYMMETRIC: only tiles on the diagonal and right of it are computed;
    the latter are also written transposed. EVEN: K is a multiple of DEPTH.
    """
    tile, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(N, SIDE)
    if SYMMETRIC:
        top = 0
        while tile >= across - top:
            tile -= across - top
            top += 1
        left = top + tile
    else:
        top, left = tile // across, tile % across
    rows = top * SIDE + tl.arange(0, SIDE)
    columns = left * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, DEPTH)
    # Past the edge other rows are read again and not written: a mask would cost more.
    a_at = a + which * a_stack + (rows % M)[:, None] * a_row + depth[None, :]
    b_at = b + which * b_stack + depth[:, None] * b_row + (columns % N)[None, :] * b_column
    summed = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            x = tl.load(a_at, mask=depth[None, :] < K - start, other=0.0)
            y = tl.load(b_at, mask=depth[:, None] < K - start, other=0.0)
        summed = tl.dot(x, y, summed)
        a_at += DEPTH
        b_at += DEPTH * b_row
    offset = which * M * N + rows[:, None] * N + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    result = alpha * summed
    if ADDED:
        result += beta * tl.load(added + offset, mask=inside, other=0.0).to(tl.float32)
    result = result.to(out.dtype.element_ty)
    tl.store(out + offset, result, mask=inside)
    if SYMMETRIC:  # noqa: SIM102 (SYMMETRIC is known at compile time, the other is not)
        if top != left:
            tl.store(out + which * M * N + columns[None, :] * N + rows[:, None], result, mask=inside)
