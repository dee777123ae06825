"""Operations that torch computes slowly in training on a CPU: in C (`native/`), or composed of fast torch operations.

The tests compare each with its formula.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from niels_gpt.kernels import lora
from niels_gpt.kernels.cpu import native
from niels_gpt.kernels.weights import HeadSizes

MANY = 2048
"""Tokens from which on GELU in C and transposed matrices are used: in a training batch, not in a prompt."""
ENOUGH = 512
"""Tokens from which on attention is computed in C; 256 take as long as with SDPA, 512 take 0.7 of it (AMD)."""
LONGEST = 2048
"""Tokens of a row up to which attention in C is faster; at 4,096 it takes 1.1 times as long as SDPA."""
WITHOUT_MKL = not torch.backends.mkl.is_available()
"""Whether torch uses OpenBLAS or the like (ARM), which is faster with a transposed matrix."""
SLOW_GELU = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
"""Whether torch's GELU backward is not vectorized: without AVX (ARM)."""


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm for training on a CPU, where torch has no fused kernel but seven separate operations.

    For 8192 x 512 floats forward and backward take 10 ms, with F.rms_norm 56, with LayerNorm 5 (one thread). A forward
    and backward pass at v0's size (with RMSNorm, SwiGLU and bf16) takes 0.78 s instead of 0.91; v1 is 4% faster.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (B, n, 1)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        # LayerNorm's backward, with a mean of 0, subtracts scale * mean(gradient * weight) for the mean. RMSNorm has
        # no mean, so that term is added again.
        wanted = [True, ctx.needs_input_grad[1], False]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, x.shape[-1:], torch.zeros_like(scale), scale, weight, None, wanted
        )
        with torch.autocast("cpu", enabled=False):  # otherwise the matmul would be rounded to bfloat16
            through_mean = (gradient @ weight)[..., None]  # (B, n, 1)
        return dx.add_(through_mean.mul_(scale).div_(x.shape[-1])), dweight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if x.requires_grad and x.dtype in (torch.float32, torch.float64):
        result: torch.Tensor = _RMSNormOnCPU.apply(x, weight, eps)
        return result
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _many(x: torch.Tensor, fewest: int) -> bool:
    """Whether x (..., width) has at least so many float32 rows on a CPU, and is not being traced."""
    return (
        x.numel() // x.shape[-1] >= fewest
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
    )


def transposes(x: torch.Tensor) -> bool:
    """Whether `linear` transposes the matrix first: a large batch, and torch without MKL."""
    return WITHOUT_MKL and _many(x, MANY) and not torch.is_autocast_enabled("cpu")


def linear(x: torch.Tensor, weight: torch.Tensor, adapter: lora.Adapter | None = None) -> torch.Tensor:
    """x weight^T; with an adapter its update is added to the matrix."""
    if adapter is not None:
        return lora.linear(x, weight, adapter, transposed=transposes(x))
    if transposes(x):
        result: torch.Tensor = _LinearWithoutMKL.apply(x, weight)
        return result
    return F.linear(x, weight)


class _LinearWithoutMKL(torch.autograd.Function):
    """F.linear with a transposed copy of the matrix: OpenBLAS then reaches 72 GFLOP/s instead of 67 (ARM)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = gradient @ weight if ctx.needs_input_grad[0] else None
        return dx, gradient.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x)."""
    result: torch.Tensor
    if x.requires_grad and _many(x, MANY) and (kernel := gelu_kernel()) is not None:
        result = _GELUInC.apply(x, kernel)
    elif x.requires_grad and x.device.type == "cpu" and x.dtype == torch.float32 and SLOW_GELU:
        result = _GELUOnPlainCPU.apply(x)
    else:
        result = F.gelu(x)
    return result


class _GELUInC(torch.autograd.Function):
    """GELU that stores its slope, so that the backward is one multiplication.

    For 8192 x 1024 forward and backward take 16 ms, with F.gelu 195 (ARM); 11 and 14 with AVX-512.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Callable[..., None]) -> torch.Tensor:
        y, slope = torch.empty_like(x), torch.empty_like(x)
        kernel(x.data_ptr(), y.data_ptr(), slope.data_ptr(), x.numel(), torch.get_num_threads())
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None


@functools.cache
@torch.inference_mode(False)  # the comparison with torch needs gradients, whatever the mode of the first caller
def gelu_kernel() -> Callable[..., None] | None:
    """gelu.c: addresses of x, of the results and of the slopes, their number, threads. None if it cannot be used."""
    library = native.library("gelu")
    if library is None:
        return None
    kernel: Callable[..., None] = library.gelu
    library.gelu.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_long, ctypes.c_int]
    library.gelu.restype = None
    return kernel if native.agrees("gelu", lambda x: _GELUInC.apply(x, kernel), F.gelu, (37, 5)) else None


class _GELUOnPlainCPU(torch.autograd.Function):
    """GELU from operations that torch vectorizes without AVX. For 8192 x 1024 its backward takes 23 ms instead of 136.

    erf(x / sqrt(2)) is stored for the backward, a second tensor of the size of x.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        erf = (x * 0.5**0.5).erf_()
        ctx.save_for_backward(x, erf)
        return torch.addcmul(x, x, erf).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, erf = ctx.saved_tensors
        slope = (x * x).mul_(-0.5).exp_().mul_(x)  # x phi(x) sqrt(2 pi)
        torch.add(erf, slope, alpha=(2 / math.pi) ** 0.5, out=slope)  # 2 (Phi(x) + x phi(x)) - 1
        return torch.addcmul(gradient, gradient, slope, out=slope).mul_(0.5)


def attends(qkv: torch.Tensor, D: int) -> bool:
    """Whether `attend` takes the heads of size D in qkv (B, n, (H + 2 G) D)."""
    fits = D % 16 == 0 and D <= 256 and qkv.shape[1] <= LONGEST
    return fits and _many(qkv, ENOUGH) and _attention_kernels(D) is not None


def attend(qkv: torch.Tensor, heads: HeadSizes, sin: torch.Tensor | None, cos: torch.Tensor | None) -> torch.Tensor:
    """Causal attention (B, n, H D) of the heads in qkv (B, n, (H + 2 G) D), q and k rotated by RoPE's tables (n, D/2).

    The result is the same for any number of threads, and for a row with any other rows beside it.
    """
    result: torch.Tensor = _AttentionInC.apply(qkv, heads, sin, cos, _attention_kernels(heads.D))
    return result


class _AttentionInC(torch.autograd.Function):
    """Attention by attention.c.

    For v0's 32 x 256 tokens forward and backward with RoPE take 91 ms, with SDPA 174 (ARM); 37 and 67 with AVX-512.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        heads: HeadSizes,
        sin: torch.Tensor | None,
        cos: torch.Tensor | None,
        kernels: _AttentionKernels,
    ) -> torch.Tensor:
        B, n, _ = qkv.shape
        y, lse = qkv.new_empty(B, n, heads.H * heads.D), qkv.new_empty(B, heads.H, n)
        kernels.run(kernels.forward, (qkv, sin, cos, y, lse), heads)
        ctx.save_for_backward(qkv, y, lse)
        ctx.others = heads, sin, cos, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv, y, lse = ctx.saved_tensors
        heads, sin, cos, kernels = ctx.others
        B, n, _ = qkv.shape
        H, G, D = heads
        dqkv = qkv.new_empty(B, n, 3, H, D)
        kernels.run(kernels.backward, (qkv, sin, cos, y, lse, gradient.contiguous(), dqkv), heads)
        if heads.grouped:
            of_groups = dqkv[:, :, 1:].unflatten(3, (G, H // G)).sum(dim=4)
            dqkv = torch.cat((dqkv[:, :, 0], of_groups.flatten(2, 3)), dim=2)
        return dqkv.view(qkv.shape), None, None, None, None


class _AttentionKernels:
    """attention.c, compiled for one head size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.forward, self.backward, self._scratch_size = (
            library.attention_forward,
            library.attention_backward,
            library.attention_scratch_size,
        )
        self._scratch_size.argtypes, self._scratch_size.restype = [ctypes.c_long], ctypes.c_long
        for kernel, tensors in ((self.forward, 6), (self.backward, 8)):
            kernel.argtypes = [*[ctypes.c_void_p] * tensors, *[ctypes.c_long] * 4, ctypes.c_int]
            kernel.restype = None

    def run(self, kernel: Callable[..., None], tensors: tuple[torch.Tensor | None, ...], heads: HeadSizes) -> None:
        """Run one of the two kernels; the first tensor is qkv (B, n, (H + 2 G) D)."""
        assert tensors[0] is not None
        B, n, _ = tensors[0].shape
        threads = torch.get_num_threads()
        scratch = torch.empty(threads * self._scratch_size(n))
        addresses = (None if t is None else t.data_ptr() for t in (*tensors, scratch))
        kernel(*addresses, B, n, heads.H, heads.kv, threads)


@functools.cache
@torch.inference_mode(False)  # as above
def _attention_kernels(D: int) -> _AttentionKernels | None:
    library = native.library("attention", D=D)
    if library is None:
        return None
    kernels = _AttentionKernels(library)
    n, heads = 37, HeadSizes(H=4, kv=2, D=D)
    angles = torch.arange(n)[:, None] / torch.arange(1, D // 2 + 1)
    sin, cos = angles.sin(), angles.cos()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def plain(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(2, (-1, D)).transpose(1, 2).split((heads.H, heads.kv, heads.kv), dim=1)
        k, v = (x.repeat_interleave(heads.H // heads.kv, dim=1) for x in (rotated(k), v))
        return F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)

    def ours(qkv: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _AttentionInC.apply(qkv, heads, sin, cos, kernels)
        return y.view(1, n, heads.H, D).transpose(1, 2)

    return kernels if native.agrees("attention", ours, plain, (1, n, (heads.H + 2 * heads.kv) * D)) else None
