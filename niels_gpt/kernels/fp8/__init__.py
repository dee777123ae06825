"""FP8 matmuls and their quantization, for CUDA devices with FP8 (Ada, Hopper and later)."""
