"""How well a tokenizer compresses texts, and which of its subwords they use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from niels_gpt.tokenizer.foreign import ForeignTokenizer
from niels_gpt.tokenizer.sizes import SubwordTokenizer
from niels_gpt.tokenizer.special import find_special

UNKNOWN_ID = 0
"""Our id of `<unk>`, which is never encoded."""


class Compression(NamedTuple):
    """The tokens of some texts. Texts with one of our special tokens are skipped: they cannot be encoded."""

    texts: int
    bytes: int
    tokens: int
    one_byte: int
    """Tokens that stand for a single byte."""
    seconds: float
    """Time to encode the texts."""
    counts: np.ndarray
    """(vocab_size,) occurrences of each id."""


def measure_compression(tokenizer: SubwordTokenizer, texts: Iterable[str]) -> Compression | None:
    """Encode texts and count their tokens; None if there is no text."""
    if isinstance(tokenizer, ForeignTokenizer):
        plain, encode = list(texts), tokenizer.encode_documents  # no text is special
    else:
        plain, encode = [text for text in texts if find_special(text) is None], tokenizer.encode_batch
    if not plain:
        return None
    began = time.perf_counter()
    ids = np.concatenate(encode(plain))
    seconds = time.perf_counter() - began
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    single = [i for i, subword in enumerate(tokenizer.token_bytes) if len(subword) == 1]
    size = sum(len(text.encode("utf-8")) for text in plain)
    return Compression(len(plain), size, len(ids), int(counts[single].sum()), seconds, counts)


def multi_byte_subwords(tokenizer: SubwordTokenizer) -> list[int]:
    """Return the ids of the subwords of several bytes, without `<unk>` and the special tokens; longest first."""
    unknown = () if isinstance(tokenizer, ForeignTokenizer) else (UNKNOWN_ID,)
    special = {*unknown, *tokenizer.special_token_ids().values()}
    sizes = [len(subword) for subword in tokenizer.token_bytes]
    ids = [i for i, size in enumerate(sizes) if size > 1 and i not in special]
    return sorted(ids, key=lambda i: (-sizes[i], i))
