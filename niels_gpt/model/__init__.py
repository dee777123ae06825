"""The GPT itself: architecture, RoPE, KV cache, loss. Knows nothing of data."""
