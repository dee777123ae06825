"""LoRA: linear maps with a frozen matrix plus a low-rank update, x (W + B A)^T, and gradients of x, A and B only.

The update is added to the matrix before the matmul, so forward and input gradient cost what they cost without it. The
backward never computes the gradient of the matrix: of N tokens it needs x A^T and g B, which are N x rank. With 2048 x
576 floats, 1536 outputs and rank 16, forward and backward take 89 ms; 125 if the whole matrix is trained, and 110 in
the usual form x W^T + (x A^T) B^T (one thread, AVX2). On an H200 the four thin matmuls wait for memory and take as long
as the gradient of a matrix of this size; there only `train.lora.layers` saves time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class Adapter(NamedTuple):
    """A low-rank update of a matrix (outputs, inputs)."""

    A: torch.Tensor
    """(rank, inputs)"""
    B: torch.Tensor
    """(outputs, rank), times the scale of the adapter."""

    def with_inputs_scaled(self, scale: torch.Tensor) -> Adapter:
        """The update of a matrix whose columns were multiplied by `scale` (inputs,)."""
        return Adapter(self.A * scale, self.B)


def merge(weight: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """weight + B A, in the dtype of the weight; computed in float32, without gradients."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.float(), adapter.B.float(), adapter.A.float()).to(weight.dtype)


def stack(first: torch.Tensor, second: torch.Tensor, adapters: tuple[Adapter | None, Adapter | None]) -> Adapter | None:
    """The adapter of two matrices that are concatenated to (outputs of both, inputs); None if neither has one."""
    if adapters == (None, None):
        return None
    A, B = [], []
    for weight, adapter in zip((first, second), adapters, strict=True):
        if adapter is not None:
            A.append(adapter.A)
        B.append(adapter.B if adapter is not None else weight.new_zeros((weight.shape[0], 0)))
    return Adapter(torch.cat(A), torch.block_diag(*B))


def linear(x: torch.Tensor, weight: torch.Tensor, adapter: Adapter | None, *, transposed: bool = False) -> torch.Tensor:
    """x (weight + B A)^T; F.linear if there is no adapter. The weight gets no gradient if there is one.

    Under autocast the matmuls are in its dtype, as those of F.linear are. `transposed`: multiply with a transposed copy
    of the matrix, which is faster with OpenBLAS.
    """
    if adapter is None:
        return F.linear(x, weight)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        # The update is rounded before the sum is: that halves the time of the sum, and the sum has no more bits.
        dtype = torch.get_autocast_dtype(device)
        with torch.no_grad():
            matrix = (weight + adapter.B @ adapter.A).to(dtype)
    else:
        dtype = x.dtype
        matrix = merge(weight, adapter).to(dtype)
    with torch.autocast(device, enabled=False):
        result: torch.Tensor = _LowRankLinear.apply(x.to(dtype), matrix, adapter.A, adapter.B, transposed)
    return result


class _LowRankLinear(torch.autograd.Function):
    """x matrix^T, where matrix = W + B A is given, and the gradients of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrix: torch.Tensor, A: torch.Tensor, B: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, matrix, A, B)
        return x @ matrix.t().contiguous() if transposed else F.linear(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, matrix, A, B = ctx.saved_tensors
        dx = gradient @ matrix if ctx.needs_input_grad[0] else None
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        dA = (gradient @ B.to(x.dtype)).t() @ x
        dB = gradient.t() @ (x @ A.to(x.dtype).t())
        return dx, None, dA.to(A.dtype), dB.to(B.dtype), None
