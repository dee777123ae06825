"""Sizes of tokens in bytes of text."""

from __future__ import annotations

from weakref import WeakKeyDictionary

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


_sizes: WeakKeyDictionary[AnyTokenizer, np.ndarray] = WeakKeyDictionary()


def token_sizes(tokenizer: AnyTokenizer) -> np.ndarray:
    """Return the number of text bytes of each id; 0 for special tokens. Shape (vocab_size,), read-only.

    They are counted once: with 152,000 ids that takes 60 ms, and an audit needs them for each document.
    """
    if tokenizer not in _sizes:
        special = set(tokenizer.special_token_ids().values())
        sizes = np.array([0 if i in special else len(piece) for i, piece in enumerate(tokenizer.token_bytes)])
        sizes.flags.writeable = False
        _sizes[tokenizer] = sizes
    return _sizes[tokenizer]


def text_bytes(tokenizer: AnyTokenizer, ids: np.ndarray) -> bytes:
    """Return the text of ids as bytes, without special tokens."""
    special, pieces = set(tokenizer.special_token_ids().values()), tokenizer.token_bytes
    return b"".join([pieces[i] for i in ids.tolist() if i not in special])
