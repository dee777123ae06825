"""Exported GGUF files in the real llama.cpp (`make test-gguf`); `make test` skips them where it is not installed."""
