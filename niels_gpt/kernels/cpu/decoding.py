"""Decoding on a CPU in C: matmuls with few rows, and the attention of one new token per row.

For 32 rows the matmuls of a v0 step take 1.2 ms, by torch with MKL 2.0; for one row of v1 2.2 ms instead of 6.4 (AMD,
two cores). Attention to 128 tokens of 32 rows takes 0.7 ms for four layers, with SDPA 1.3.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from niels_gpt.kernels.cpu import native, ops

MOST_ROWS = 64
"""Rows up to which `Panels` were measured to be faster than torch."""


class Panels:
    """A matrix (N, K) in the layout that matmul.c reads, with its product."""

    def __init__(self, weight: torch.Tensor, kernel: MatmulKernel) -> None:
        self.N, self.K = weight.shape
        self._run = kernel.run
        self._memory = kernel.stored(weight)
        self._address = self._memory.data_ptr()

    def multiply(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """add + x weight^T (M, N) for contiguous x (M, K) and add (M, N). No gradients.

        A row of the result is the same, bit by bit, for any rows beside it and any number of threads.
        """
        M = x.shape[0]
        y = x.new_empty(M, self.N)
        added = None if add is None else add.data_ptr()
        threads = torch.get_num_threads()
        self._run(x.data_ptr(), self._address, added, y.data_ptr(), M, self.N, self.K, threads)
        return y


class MatmulKernel:
    """matmul.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.run: Callable[..., None] = library.matmul
        self._store, self._size = library.matmul_store_panels, library.matmul_panels_size
        library.matmul.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3, ctypes.c_int]
        self._store.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 2, ctypes.c_int]
        self._size.argtypes, self._size.restype = [ctypes.c_long] * 2, ctypes.c_long
        library.matmul.restype = self._store.restype = None

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """The panels of a matrix (N, K)."""
        weight, (N, K) = weight.detach().contiguous(), weight.shape
        panels = torch.empty(self._size(N, K))
        self._store(weight.data_ptr(), panels.data_ptr(), N, K, torch.get_num_threads())
        return panels


class TokenAttention:
    """token_attention.c, compiled for one head size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run, self._scratch_size = library.token_attention, library.token_attention_scratch_size
        self._run.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_long] * 4, ctypes.c_int]
        self._run.restype = None
        self._scratch_size.argtypes, self._scratch_size.restype = [ctypes.c_long], ctypes.c_long

    def layers(
        self, rotation: torch.Tensor | None, buffer: torch.Tensor, lengths: list[int], H: int
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """A function (layer, qkv (B, (H + 2 G) D)) -> (B, H D), for one token more in each row of a KV cache.

        It adds the keys and values of the token to the buffer (L, B, 2, G, T, D), whose rows have these lengths before.
        rotation: cosine and sine (T or more, D/2, 2), or None without RoPE. A row of the result is the same, bit by
        bit, for any rows beside it and any number of threads.
        """
        _, B, _, G, T, D = buffer.shape
        run, threads, width = self._run, torch.get_num_threads(), H * D
        scratch, before = torch.empty(threads * self._scratch_size(T)), torch.tensor(lengths)
        angles = None if rotation is None else rotation.data_ptr()
        first, apart = buffer.data_ptr(), buffer.stride(0) * buffer.element_size()

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            y = qkv.new_empty(B, width)
            cache, used, memory = first + layer * apart, before.data_ptr(), scratch.data_ptr()
            run(qkv.data_ptr(), angles, cache, used, y.data_ptr(), memory, B, H, G, T, threads)
            return y

        return attend


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x) of a small tensor, by the kernel of training if there is one. No gradients."""
    kernel = ops.gelu_kernel()
    if kernel is None:
        return F.gelu(x)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), slope.data_ptr(), x.numel(), torch.get_num_threads())
    return y


@functools.cache
def matmul_kernel() -> MatmulKernel | None:
    """The kernel; None if it cannot be compiled or disagrees with torch, and then `native.problem` says why."""
    library = native.library("matmul")
    if library is None:
        return None
    kernel = MatmulKernel(library)
    random = torch.Generator().manual_seed(0)
    x, weight, add = (torch.randn(shape, generator=random) for shape in ((13, 24), (75, 24), (13, 75)))
    ours = Panels(weight, kernel).multiply(x, add)
    return kernel if native.equals("matmul", [ours], [torch.addmm(add, x, weight.t())]) else None


@functools.cache
def token_attention(D: int) -> TokenAttention | None:
    """The kernel for heads of size D; None if there is none, and then `native.problem` says why, unless D is not
    supported: it must be a multiple of 16, up to 256."""
    library = native.library("token_attention", D=D) if D % 16 == 0 and D <= 256 else None
    if library is None:
        return None
    kernel, H, G, lengths, T = TokenAttention(library), 4, 2, [0, 5, 36], 40
    random = torch.Generator().manual_seed(0)
    before, qkv = (torch.randn(shape, generator=random) for shape in ((1, 3, 2, G, T, D), (3, (H + 2 * G) * D)))
    after = before.clone()
    ours = kernel.layers(None, after, lengths, H)(0, qkv)
    q, k, v = qkv.view(3, -1, D).split((H, G, G), dim=1)
    expected, rows = [], []
    for row, n in enumerate(lengths):
        keys, values = (
            torch.cat((before[0, row, i, :, :n], x[row, :, None]), dim=1).repeat_interleave(H // G, dim=0)
            for i, x in enumerate((k, v))
        )
        expected.append(F.scaled_dot_product_attention(q[row, :, None], keys, values).flatten())
        rows.append(torch.stack((k[row], v[row])))
    stored = [after[0, row, :, :, n] for row, n in enumerate(lengths)]
    return kernel if native.equals("token_attention", [*ours, *stored], [*expected, *rows]) else None
