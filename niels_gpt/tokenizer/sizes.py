"""Sizes of tokens in bytes of text."""

from __future__ import annotations

import numpy as np

from niels_gpt.tokenizer.byte_level import ByteTokenizer
from niels_gpt.tokenizer.foreign import ForeignTokenizer
from niels_gpt.tokenizer.subword import Tokenizer

SubwordTokenizer = Tokenizer | ForeignTokenizer
AnyTokenizer = ByteTokenizer | SubwordTokenizer


def fits(tokenizer: AnyTokenizer, V: int) -> bool:
    """Whether a tokenizer can belong to a model of V ids: ours has as many, one of others may have fewer."""
    if isinstance(tokenizer, ForeignTokenizer):
        return tokenizer.vocab_size <= V
    return tokenizer.vocab_size == V or (isinstance(tokenizer, ByteTokenizer) and V < 256)


def token_sizes(tokenizer: AnyTokenizer) -> np.ndarray:
    """Return the number of text bytes of each id; 0 for special tokens. Shape (vocab_size,)."""
    special = set(tokenizer.special_token_ids().values())
    return np.array([0 if i in special else len(piece) for i, piece in enumerate(tokenizer.token_bytes)])


def text_bytes(tokenizer: AnyTokenizer, ids: np.ndarray) -> bytes:
    """Return the text of ids as bytes, without special tokens."""
    special, pieces = set(tokenizer.special_token_ids().values()), tokenizer.token_bytes
    return b"".join([pieces[i] for i in ids.tolist() if i not in special])
