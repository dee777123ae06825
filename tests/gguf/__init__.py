"""Exported GGUF files in the real llama.cpp (`make test WHAT=gguf`); `make test` skips them without it."""
