"""Triton kernels that decode one token per row on CUDA; `decode_step.py` puts them in order.

What they read and write is float32. Tensor cores are not: there each number is two, its first 11 bits and its next 11,
as float16 or as tf32, and a product is three; what is left out is as small as float32's own rounding in a sum.

Sizes are arguments and not constants, and so are the kind of a norm and what follows a product: two to four kernels
are compiled for a model, not one per matrix. Nothing is added up in an order that depends on the other rows or on the
clock: the same tokens come again, bit for bit.
"""

from __future__ import annotations

from niels_gpt.kernels.decode.attention import attend_kernel
from niels_gpt.kernels.decode.matmul import (
    deep_kernel,
    lean_kernel,
    paired_kernel,
    vector_kernel,
    wide_kernel,
)
from niels_gpt.kernels.decode.sample import choose_kernel

__all__ = [
    "attend_kernel", "choose_kernel", "deep_kernel", "lean_kernel", "paired_kernel", "vector_kernel", "wide_kernel",
]  # fmt: skip
