"""The GPT in plain PyTorch, and the choice of the kernels that compute it. Knows nothing of data."""
