"""One decode step on CUDA: matmuls, attention and sampling, captured as a CUDA graph."""
