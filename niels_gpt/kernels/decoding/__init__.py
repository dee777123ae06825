"""One decode step on CUDA: matmuls, attention and sampling in Triton, captured as a CUDA graph.

The kernels read and write float32. Tensor cores do not: for them each number is split into two, its first 11 bits and
its next 11, as float16 or tf32, and a matmul becomes three; the dropped fourth is as small as float32's rounding.

Sizes are arguments and not constants, and so are the kind of norm and what follows a matmul (the epilogue): a model
compiles two to four kernels, not one per matrix. No sum depends on the other rows or on timing: the same tokens come
again, bit for bit.
"""
