"""The GPT itself: architecture, loss, checkpoints, the fast forms for one token and for CUDA. Knows nothing of data."""
