"""Text to ids and back: by bytes (`encode`, `decode`) or by learned subwords (`load_tokenizer`)."""

from niels_gpt.tokenizer.byte_level import ByteTokenizer, decode, encode
from niels_gpt.tokenizer.foreign import ForeignTokenizer, remove_foreign, write_foreign
from niels_gpt.tokenizer.loading import has_tokenizer, load_tokenizer
from niels_gpt.tokenizer.private_pieces import private_pieces
from niels_gpt.tokenizer.sizes import AnyTokenizer, SubwordTokenizer, fits, text_bytes, token_sizes
from niels_gpt.tokenizer.special import SPECIAL_TOKENS, find_special, refuse_special
from niels_gpt.tokenizer.subword import Tokenizer
from niels_gpt.tokenizer.training import train_tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "AnyTokenizer",
    "ByteTokenizer",
    "ForeignTokenizer",
    "SubwordTokenizer",
    "Tokenizer",
    "decode",
    "encode",
    "find_special",
    "fits",
    "has_tokenizer",
    "load_tokenizer",
    "private_pieces",
    "refuse_special",
    "remove_foreign",
    "text_bytes",
    "token_sizes",
    "train_tokenizer",
    "write_foreign",
]
