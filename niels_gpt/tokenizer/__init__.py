"""Text to ids and back."""

from niels_gpt.tokenizer.byte_level import decode, encode

__all__ = ["decode", "encode"]
