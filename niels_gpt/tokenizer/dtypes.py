"""The dtype of arrays of token ids."""

from __future__ import annotations

import numpy as np

MAX_VOCAB = 2**31
"""Ids fit in an int32, which the frames of `splice/` are."""


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the little-endian dtype of the ids of a vocabulary: uint16, or uint32 if it has more than 65,536 ids.

    Raises ValueError for a vocabulary that is empty, or has more than 2**31 ids.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"the vocabulary has {vocab_size:,} ids; it must have 1..{MAX_VOCAB:,}")
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")
