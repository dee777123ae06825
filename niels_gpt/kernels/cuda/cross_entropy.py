"""Cross-entropy of a linear head in bfloat16 or FP8, without the logits of all positions in memory at once.

The forward pass computes logits for some rows, turns them into their gradient in place, and adds up the gradients of
the input and of the matrix; the backward pass only multiplies these by the incoming gradient, which is one number.
"""

from __future__ import annotations

from typing import Any

import torch

from niels_gpt.kernels.fp8 import quantize

LOGITS_BYTES = 1 << 29
"""Memory for the logits of one chunk of rows."""
LOGITS_SHARE = 6
"""Or this many times the memory of the head's gradient, if that is more: each chunk reads and writes it once."""


@torch.library.custom_op("niels_gpt::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, fp8: bool, frozen: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradient of h, gradient of weight; of 0 rows if it is frozen)."""
    from niels_gpt.kernels.cuda import cross_entropy_triton

    N, C = h.shape
    V = weight.shape[0]
    padded = -(-V // 64) * 64  # matmuls are twice as fast if the rows of the matrix are aligned
    matrix = torch.zeros((padded, C), dtype=h.dtype, device=h.device)
    matrix[:V].copy_(weight)
    memory = max(LOGITS_BYTES, LOGITS_SHARE * padded * C * 4)
    rows = min(N, 1 << max(10, (memory // (padded * h.element_size())).bit_length() - 1))
    logits = torch.empty((rows, padded), dtype=h.dtype, device=h.device)
    if fp8:
        matrix8, transposed8, one_scale, row_scales, _ = quantize.matrices([([matrix], None)])[0]
        unit = 2.0**-15 / total.to(torch.float32).reshape(())
    gradients = logits.new_empty((rows, padded), dtype=torch.float8_e5m2) if fp8 else logits
    losses = torch.empty(N, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h)
    dweight = torch.empty((0 if frozen else padded, C), dtype=torch.float32, device=h.device)
    block = 2048 if V > 1024 else max(16, 1 << (-(-padded // 4) - 1).bit_length())
    for start in range(0, N, rows):
        chunk = h[start : start + rows]
        z, dz = logits[: len(chunk)], gradients[: len(chunk)]
        if fp8:
            chunk8, scale = quantize.rows(chunk)
            torch._scaled_mm(chunk8, matrix8.t(), scale, row_scales.t(), out_dtype=h.dtype, use_fast_accum=True, out=z)
        else:
            torch.mm(chunk, matrix.t(), out=z)
        cross_entropy_triton.cross_entropy_kernel[(len(chunk),)](
            z, dz, targets[start:], losses[start:], total, V, padded,
            BLOCK=block, FP8=fp8, num_warps=8 if V > 1024 else 1,
        )  # fmt: skip
        if fp8:
            torch._scaled_mm(dz, transposed8.t(), unit, one_scale, out_dtype=h.dtype, out=dh[start : start + rows])
            if not frozen:
                added = quantize.weight_gradient(dz, chunk8, scale, unit)
                dweight = added if start == 0 else dweight.add_(added)
        else:
            torch.mm(dz, matrix, out=dh[start : start + rows])
            if frozen:
                continue
            if start == 0:
                torch.mm(dz.t(), chunk, out_dtype=torch.float32, out=dweight)
            else:
                torch.addmm(dweight, dz.t(), chunk, out_dtype=torch.float32, out=dweight)
    return losses.sum() / total, dh, dweight[:V]


@_linear_cross_entropy.register_fake
def _(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, fp8: bool, frozen: bool
) -> tuple[torch.Tensor, ...]:
    dweight = weight.new_empty((0 if frozen else weight.shape[0], weight.shape[1]), dtype=torch.float32)
    return h.new_empty((), dtype=torch.float32), torch.empty_like(h), dweight


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.frozen = inputs[-1]


def _scale_gradients(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dh, dweight = ctx.saved_tensors
    return dh * gradient.to(dh.dtype), None if ctx.frozen else dweight * gradient, None, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def linear_cross_entropy(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, *, fp8: bool = False
) -> torch.Tensor:
    """Summed cross-entropy of softmax(h weight^T) at the targets, divided by `total`: a float32 scalar.

    h (N, C) bfloat16; weight (V, C) float32; targets (N,) int64, of which -100 do not count; total, of one element, may
    be on the device. Logits are bfloat16, as under autocast, and their softmax is float32. `fp8`: all matmuls are FP8.
    A weight that needs no gradient gets none, which saves a third of the matmuls.
    """
    return _linear_cross_entropy(h, weight, targets, total, fp8, not weight.requires_grad)[0]
