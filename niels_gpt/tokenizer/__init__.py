"""Text to ids and back: by bytes (`encode`, `decode`) or by learned subwords (`load_tokenizer`)."""

from niels_gpt.tokenizer.byte_level import ByteTokenizer, decode, encode
from niels_gpt.tokenizer.sizes import AnyTokenizer, text_bytes, token_sizes
from niels_gpt.tokenizer.special import SPECIAL_TOKENS, find_special, refuse_special
from niels_gpt.tokenizer.subword import Tokenizer, load_tokenizer
from niels_gpt.tokenizer.training import train_tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "AnyTokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "decode",
    "encode",
    "find_special",
    "load_tokenizer",
    "refuse_special",
    "text_bytes",
    "token_sizes",
    "train_tokenizer",
]
