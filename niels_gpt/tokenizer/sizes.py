"""How many bytes of text each token id stands for."""

from __future__ import annotations

import numpy as np

from niels_gpt.tokenizer.byte_level import ByteTokenizer
from niels_gpt.tokenizer.pieces import Tokenizer

AnyTokenizer = ByteTokenizer | Tokenizer


def token_sizes(tokenizer: AnyTokenizer) -> np.ndarray:
    """How many bytes of text each id stands for; special tokens stand for none."""
    special = set(tokenizer.special_token_ids().values())
    return np.array([0 if i in special else len(piece) for i, piece in enumerate(tokenizer.token_bytes)])


def text_bytes(tokenizer: AnyTokenizer, ids: np.ndarray) -> bytes:
    """The text of ids as bytes, without special tokens."""
    special, pieces = set(tokenizer.special_token_ids().values()), tokenizer.token_bytes
    return b"".join([pieces[i] for i in ids.tolist() if i not in special])
