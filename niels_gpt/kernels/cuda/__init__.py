"""Training kernels for CUDA in bfloat16, written in Triton."""
