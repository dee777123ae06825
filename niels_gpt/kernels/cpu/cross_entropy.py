"""Cross-entropy of a linear head on a CPU, without the logits of all positions in memory at once.

The forward pass computes logits for some rows, turns them into their gradient in place, and adds up the gradients of
the input and of the matrix; the backward pass only multiplies these by the incoming gradient, which is one number.
torch holds three tensors of the size of all logits and computes each exponential twice: for 4,096 tokens and a
vocabulary of 49,152 they take 2.4 GB, here 65 MB.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

FEWEST_LOGITS = 1 << 19
"""Smallest number of logits for which this is used; below it torch is as fast."""
LOGITS_BYTES = 1 << 26
"""Memory for the logits of one chunk of rows."""
FEWEST_ROWS = 256
"""Rows of a chunk, at least; for V=16,004 chunks of 256 rows took 8 % longer than those of 1,024."""


def takes(h: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_cross_entropy` is used for h (..., C) and weight (V, C)."""
    logits = h.numel() // h.shape[-1] * weight.shape[0]
    return logits >= FEWEST_LOGITS and h.device.type == "cpu" and not torch.compiler.is_compiling()


def linear_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    total: torch.Tensor | None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Summed cross-entropy of softmax(h weight^T) at the targets, divided by `total`; None: by their number. A scalar.

    h (..., C); weight (V, C); targets (...), each in 0..V-1. Under autocast the matmuls are in its dtype, and the
    softmax is float32. A weight that needs no gradient gets none, which saves a third of the matmuls. `transposed`:
    multiply with a transposed copy of the matrix, which is faster with OpenBLAS.

    The gradients are returned without a copy, so only one backward may accumulate them in place.
    """
    half = torch.is_autocast_enabled("cpu") and h.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if half else h.dtype
    x, y = h.reshape(-1, h.shape[-1]).to(dtype), targets.reshape(-1, 1)
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
    with torch.autocast("cpu", enabled=False):
        loss: torch.Tensor = _LinearCrossEntropy.apply(x, weight, y, total, wanted, transposed)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of x (N, C) and targets (N, 1). The gradients of x and of the weight are computed with it, if wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        total: torch.Tensor | None,
        wanted: tuple[bool, bool],
        transposed: bool,
    ) -> torch.Tensor:
        matrix = weight.to(x.dtype)
        right = matrix.t().contiguous() if transposed else matrix.t()
        dx = torch.empty_like(x) if wanted[0] else None
        exact = torch.promote_types(weight.dtype, torch.float32)
        dweight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        divisor, losses = None, []
        for rows in _chunks(len(x), len(weight)):
            chunk, y = x[rows], targets[rows]
            z = chunk @ right
            z = z.float() if z.element_size() < 4 else z  # the softmax is not computed in bfloat16
            if divisor is None:
                divisor = z.new_tensor(len(x)) if total is None else total.to(z.dtype)
            z.sub_(z.amax(dim=1, keepdim=True))
            at_target = z.gather(1, y)
            sums = z.exp_().sum(dim=1, keepdim=True)
            losses.append((sums.log() - at_target).sum())
            if not any(wanted):
                continue
            z.div_(sums.mul_(divisor))  # softmax / divisor
            z.scatter_add_(1, y, (-1 / divisor).expand_as(y))
            dz = z.to(x.dtype)
            if dx is not None:
                torch.mm(dz, matrix, out=dx[rows])
            if dweight is not None and dweight.dtype == dz.dtype:
                dweight.addmm_(dz.t(), chunk)
            elif dweight is not None:
                dweight.add_(dz.t() @ chunk)  # summed over the chunks in float32
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        assert divisor is not None
        return torch.stack(losses).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if float(gradient) != 1:
            gradients = [None if g is None else g * gradient.to(g.dtype) for g in gradients]
        return *gradients, None, None, None, None


def _chunks(N: int, V: int) -> list[slice]:
    """Equal parts of N rows, with logits of about LOGITS_BYTES each."""
    most = max(LOGITS_BYTES // (4 * V), FEWEST_ROWS)
    rows = -(-N // -(-N // most))
    return [slice(start, start + rows) for start in range(0, N, rows)]
