"""Documents to read spans from: arrays in memory, or documents of a token cache that stay on disk."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from niels_gpt.cache.token_stream import TokenStream

MAX_ID = 2**31 - 1
"""Token ids are 32-bit integers."""


class Documents(Protocol):
    """The documents of a dataset."""

    lengths: np.ndarray
    """(N,) int64: tokens of each document."""

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        """Fill `out` with tokens t .. t + len(out) - 1 of a document."""


class ArrayDocuments:
    """Documents given as arrays (or lists) of token ids."""

    def __init__(self, documents: Sequence[np.ndarray | Sequence[int]]) -> None:
        """Raises ValueError for a document that is not a one-dimensional array of ids in 0..2**31-1."""
        try:
            iterator = iter(documents)
        except TypeError:
            raise ValueError(f"doc_tokens_list must be a list of documents, got {documents!r}") from None
        self._arrays = [_array(document, i) for i, document in enumerate(iterator)]
        if not self._arrays:
            raise ValueError("doc_tokens_list is empty: pass at least one document")
        for i, array in enumerate(self._arrays):
            if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
                raise ValueError(f"document {i} must be a 1-D array of integer ids, got {array.dtype} {array.shape}")
        # Frames are int32. Ranges are checked for many documents at a time: a million separate checks take seconds.
        unchecked = [a for a in self._arrays if a.dtype.kind == "i" or a.dtype.itemsize > 2]
        for i in range(0, len(unchecked), 10_000):
            ids = unchecked[i] if len(unchecked) == 1 else np.concatenate(unchecked[i : i + 10_000])
            if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_ID:
                raise ValueError(f"token ids must be in 0..{MAX_ID}, got {ids.min()}..{ids.max()}")
        self.lengths = np.fromiter(map(len, self._arrays), dtype=np.int64, count=len(self._arrays))

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        out[:] = self._arrays[doc][t : t + len(out)]


def _array(document: np.ndarray | Sequence[int], i: int) -> np.ndarray:
    if isinstance(document, bytes | bytearray):
        return np.frombuffer(document, dtype=np.uint8)
    if isinstance(document, np.ndarray):
        return document
    try:
        return np.asarray(document)
    except ValueError:
        raise ValueError(f"document {i} must be a 1-D array of integer ids, got rows of different lengths") from None


class CacheDocuments:
    """Selected documents of one split of a token cache."""

    def __init__(
        self, stream: TokenStream, indices: Sequence[int] | np.ndarray, *, vocabulary: int | None = None
    ) -> None:
        """`vocabulary`: vocabulary size; if given, ids are checked against it when they are read.

        Raises CacheError for a cache without documents.npy, ValueError for an index past its documents.
        """
        self.stream, self.vocabulary = stream, vocabulary
        starts = stream.documents
        self.indices = _document_indices(indices)
        outside = self.indices[(self.indices < 0) | (self.indices >= len(starts))]
        if len(outside):
            raise ValueError(f"{stream.folder} has {len(starts)} documents, numbered from 0; there is no {outside[0]}")
        self._starts = np.asarray(starts[self.indices], dtype=np.int64)
        self.lengths = stream.document_lengths()[self.indices]

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        self.stream.read(int(self._starts[doc]) + t, out)
        if self.vocabulary is not None:
            self.stream.check_document(int(self.indices[doc]), out, self.vocabulary)


def _document_indices(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Document indices as int64. Raises ValueError for anything but a list of integers."""
    try:
        given = np.asarray(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError
    except ValueError:
        raise ValueError(f"doc_indices must be a list of integers, got {reprlib.repr(indices)}") from None
    return given.astype(np.int64)


def open_stream(cache_dir: str | Path, split: str) -> TokenStream:
    """Open the token stream of a split of a pretrain cache. Raises CacheError."""
    from niels_gpt.cache.token_stream import TokenStream

    return TokenStream(Path(cache_dir) / split)
