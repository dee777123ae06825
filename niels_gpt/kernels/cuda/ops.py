"""Operators for training on CUDA in bfloat16: cross-entropy without all logits, heads with RoPE, GELU, SwiGLU.

They are operators of torch: autograd, torch.compile and CUDA graphs take them as they take its own. Everywhere else
the model uses plain torch, which the tests hold these to. Products are torch's; with `eight` also in FP8 (`fp8.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from niels_gpt.kernels.fp8 import quantize
from niels_gpt.system.device import HAS_TRITON

LOGITS_BYTES = 1 << 29
"""Room for the logits that exist at one time; more only where they would be less than LOGITS_SHARE gradients."""
LOGITS_SHARE = 6
"""With every part of the logits the whole gradient of the head is read and written again."""


def usable(x: torch.Tensor) -> bool:
    """Whether these operators compute on x: bfloat16 on CUDA, where torch came with Triton."""
    return HAS_TRITON and x.is_cuda and x.dtype == torch.bfloat16


def in_bf16(x: torch.Tensor) -> bool:
    """Whether a product with x on its device gives what `usable` takes: CUDA, under bf16 autocast."""
    return (
        HAS_TRITON
        and x.is_cuda
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


# --- cross-entropy ---------------------------------------------------------------------------------


@torch.library.custom_op("niels_gpt::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, eight: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, its gradient for h, for weight): logits are made, used and overwritten a part of the rows at a time."""
    from niels_gpt.kernels.cuda import ops_triton

    N, C = h.shape
    V = weight.shape[0]
    padded = -(-V // 64) * 64  # products are twice as fast where the rows of the matrix are aligned
    table = torch.zeros((padded, C), dtype=h.dtype, device=h.device)
    table[:V].copy_(weight)
    room = max(LOGITS_BYTES, LOGITS_SHARE * padded * C * 4)
    rows = min(N, 1 << max(10, (room // (padded * h.element_size())).bit_length() - 1))
    logits = torch.empty((rows, padded), dtype=h.dtype, device=h.device)
    if eight:
        table8, across8, one, scales, _ = quantize.matrices([([table], None)])[0]
        unit = 2.0**-15 / total.to(torch.float32).reshape(())
    gradients = logits.new_empty((rows, padded), dtype=torch.float8_e5m2) if eight else logits
    losses = torch.empty(N, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h)
    dweight = torch.empty((padded, C), dtype=torch.float32, device=h.device)
    block = 2048 if V > 1024 else max(16, 1 << (-(-padded // 4) - 1).bit_length())
    for start in range(0, N, rows):
        part = h[start : start + rows]
        own, back = logits[: len(part)], gradients[: len(part)]
        if eight:
            part8, scale = quantize.rows(part)
            torch._scaled_mm(part8, table8.t(), scale, scales.t(), out_dtype=h.dtype, use_fast_accum=True, out=own)
        else:
            torch.mm(part, table.t(), out=own)
        ops_triton.cross_entropy_kernel[(len(part),)](
            own, back, targets[start:], losses[start:], total, V, padded,
            BLOCK=block, EIGHT=eight, num_warps=8 if V > 1024 else 1,
        )  # fmt: skip
        if eight:
            torch._scaled_mm(back, across8.t(), unit, one, out_dtype=h.dtype, out=dh[start : start + rows])
            made = quantize.over_tokens(back, part8, scale, unit)
            dweight = made if start == 0 else dweight.add_(made)
        else:
            torch.mm(back, table, out=dh[start : start + rows])
            if start == 0:
                torch.mm(back.t(), part, out_dtype=torch.float32, out=dweight)
            else:
                torch.addmm(dweight, back.t(), part, out_dtype=torch.float32, out=dweight)
    return losses.sum() / total, dh, dweight[:V]


@_linear_cross_entropy.register_fake
def _(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, eight: bool
) -> tuple[torch.Tensor, ...]:
    return h.new_empty((), dtype=torch.float32), torch.empty_like(h), weight.new_empty(weight.shape)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[2])


def _scale_gradients(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dh, dweight = ctx.saved_tensors
    return dh * gradient.to(dh.dtype), dweight * gradient, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def linear_cross_entropy(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, *, eight: bool = False
) -> torch.Tensor:
    """The summed cross-entropy of softmax(h weight^T) at the targets, divided by `total`: a float32 number.

    h (N, C) bfloat16; weight (V, C) float32; targets (N,) int64, those of -100 do not count; total, of one element,
    may live on the device. Logits are bfloat16, as under autocast, and their softmax is float32. `eight`: all products
    are FP8.
    """
    return _linear_cross_entropy(h, weight, targets, total, eight)[0]


# --- heads -----------------------------------------------------------------------------------------


def _sizes(H: int, D: int) -> dict[str, int]:
    return {"HEADS": 1 << (H - 1).bit_length(), "WIDTH": 1 << (D - 1).bit_length()}


@torch.library.custom_op("niels_gpt::turned_heads", mutates_args=())
def _turned_heads(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from niels_gpt.kernels.cuda import ops_triton

    B, n, _, H, D = qkv.shape
    q, k, v = (qkv.new_empty((B, n, H, D)) for _ in range(3))
    ops_triton.rope_kernel[(B * n,)](qkv, q, k, v, sin, cos, n, H, D, **_sizes(H, D), VALUES=True, num_warps=2)
    return q, k, v


@_turned_heads.register_fake
def _(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, ...]:
    B, n, _, H, D = qkv.shape
    return tuple(qkv.new_empty((B, n, H, D)) for _ in range(3))


@torch.library.custom_op("niels_gpt::turned_pair", mutates_args=())
def turned_pair(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only q and k of `turned_heads`, without autograd: for those who take v from where it lies."""
    from niels_gpt.kernels.cuda import ops_triton

    B, n, _, H, D = qkv.shape
    q, k = qkv.new_empty((B, n, H, D)), qkv.new_empty((B, n, H, D))
    ops_triton.rope_kernel[(B * n,)](qkv, q, k, k, sin, cos, n, H, D, **_sizes(H, D), VALUES=False, num_warps=2)
    return q, k


@turned_pair.register_fake
def _(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, ...]:
    B, n, _, H, D = qkv.shape
    return qkv.new_empty((B, n, H, D)), qkv.new_empty((B, n, H, D))


@torch.library.custom_op("niels_gpt::turned_heads_backward", mutates_args=())
def _turned_heads_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> torch.Tensor:
    return turn_back(dq, dk, dv, sin, cos, dq.new_empty((*dq.shape[:2], 3, *dq.shape[2:])))


def turn_back(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    dqkv: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Into dqkv, the gradient of what `turned_heads` was given; with scales in FP8, with a scale for each token.

    Without sin and cos: of what was not turned, only split.
    """
    from niels_gpt.kernels.cuda import ops_triton

    B, n, H, D = dq.shape
    given = [g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv)]
    strides = [stride for g in given for stride in g.stride()[:3]]
    ops_triton.rope_backward_kernel[(B * n,)](
        *given, dqkv, scales, sin, cos, n, H, D, *strides,
        **_sizes(H, D), TURN=sin is not None, EIGHT=scales is not None, num_warps=2,
    )  # fmt: skip
    return dqkv


@_turned_heads_backward.register_fake
def _(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    B, n, H, D = dq.shape
    return dq.new_empty((B, n, 3, H, D))


def _keep_turn(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _turn_back(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _turned_heads_backward(*gradients, *ctx.saved_tensors), None, None


_turned_heads.register_autograd(_turn_back, setup_context=_keep_turn)


def turned_heads(
    qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v), each (B, n, H, D), of qkv (B, n, 3, H, D): q and k turned by RoPE at positions 0..n-1.

    sin and cos (n, D/2) float32, contiguous.
    """
    return _turned_heads(qkv, sin, cos)


# --- activations -----------------------------------------------------------------------------------


def _block(F: int, gated: bool) -> int:
    """Elements of a row for one program."""
    return min(1 << (F - 1).bit_length(), 2048 if gated else 1024)


@torch.library.custom_op("niels_gpt::activation", mutates_args=())
def activation(x: torch.Tensor, gated: bool) -> torch.Tensor:
    """x Phi(x), the exact GELU; gated: silu(gate) up, for x (..., 2 F) = gate, up side by side."""
    from niels_gpt.kernels.cuda import ops_triton

    x = x.contiguous()
    F = x.shape[-1] // (2 if gated else 1)
    y, block = x.new_empty((*x.shape[:-1], F)), _block(F, gated)
    ops_triton.activation_kernel[(y.numel() // F, -(-F // block))](x, y, F, BLOCK=block, GATED=gated, num_warps=4)
    return y


@torch.library.custom_op("niels_gpt::activation_backward", mutates_args=())
def _activation_backward(dy: torch.Tensor, x: torch.Tensor, gated: bool) -> torch.Tensor:
    from niels_gpt.kernels.cuda import ops_triton

    dy, x = dy.contiguous(), x.contiguous()
    F, dx = dy.shape[-1], torch.empty_like(x)
    block = _block(F, gated)
    ops_triton.activation_backward_kernel[(dy.numel() // F, -(-F // block))](
        dy, x, dx, F, BLOCK=block, GATED=gated, num_warps=4
    )
    return dx


def _keep_input(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.gated = inputs[1]


def _back(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _activation_backward(dy, ctx.saved_tensors[0], ctx.gated), None


activation.register_fake(lambda x, gated: x.new_empty((*x.shape[:-1], x.shape[-1] // (2 if gated else 1))))
_activation_backward.register_fake(lambda dy, x, gated: torch.empty_like(x, memory_format=torch.contiguous_format))
activation.register_autograd(_back, setup_context=_keep_input)
