"""Documents to read spans from: arrays in memory, or documents of a token cache that stay on disk."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from niels_gpt.config.splice import SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig

if TYPE_CHECKING:
    from niels_gpt.cache.token_stream import TokenStream
    from niels_gpt.tokenizer import SubwordTokenizer

SelectionConfig = SpliceSingleDocumentLMConfig | SpliceMultiDocumentLMConfig

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

    def __init__(
        self, documents: Sequence[np.ndarray | Sequence[int]], *, indices: Sequence[int] | None = None
    ) -> None:
        """`indices`: the index of each document in its source, for messages; None: its position in the list.

        Raises ValueError for a document that is not a one-dimensional array of ids in 0..2**31-1.
        """
        self.indices = indices
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


def choose(
    config: SelectionConfig,
    lengths: np.ndarray,
    ends: np.ndarray,
    S: int,
    text_of: Callable[[int], bytes],
) -> list[int]:
    """The indices of the documents that a config selects; `text_of(i)` is read only for doc_key.

    Raises ValueError if there are too few, or doc_index does not contain doc_key.
    """
    if config.doc_key is None:
        return config.select(lengths, ends=ends, S=S)
    key = config.doc_key.encode("utf-8")
    matches = [i for i in range(len(lengths)) if key in text_of(i)]
    if not matches:
        raise ValueError(f"splice.doc_key: none of {len(lengths):,} documents contains {config.doc_key!r}")
    among = dataclasses.replace(config, doc_key=None)
    index = getattr(config, "doc_index", None)
    if index is not None:
        if index not in matches:
            raise ValueError(f"splice.doc_index={index}: this document does not contain {config.doc_key!r}")
        among = dataclasses.replace(among, doc_index=matches.index(index))  # type: ignore[arg-type]
    return [matches[i] for i in among.select(lengths[matches], ends=ends[matches], S=S)]


def select_from_cache(config: SelectionConfig, cache: OpenCache, S: int) -> list[int]:
    """The indices of the documents of a cache that a config selects. Raises ValueError if there are too few."""
    from niels_gpt.tokenizer import text_bytes

    config.warn_about_limits()
    stream = cache.stream
    ends = np.append(stream.documents[1:], stream.num_tokens)
    return choose(
        config, stream.document_lengths(), ends, S, lambda i: text_bytes(cache.tokenizer(), stream.document(i))
    )


class OpenCache:
    """A split of a pretrain cache, found by its folder or by the `base` and `dataset_name` of a config."""

    def __init__(
        self,
        cache_dir: str | Path | None,
        split: str,
        config: SelectionConfig | None,
    ) -> None:
        """Raises CacheError for a missing or damaged cache, ValueError if the config names another cache or
        tokenizer than that of `cache_dir`.
        """
        from niels_gpt.cache.token_stream import TokenStream

        base, name, tokenizer = (
            (None, None, None) if config is None else (config.base, config.dataset_name, config.tokenizer)
        )
        self.folder, self.name = _cache_folder(cache_dir, base, name)
        expected = None if tokenizer is None else tokenizer_hash(tokenizer)
        self.stream = TokenStream(self.folder / split, tokenizer_sha256=expected)

    def tokenizer(self) -> SubwordTokenizer:
        """The tokenizer of the cache's folder."""
        from niels_gpt.cache.folder import CacheFolder

        return CacheFolder(self.folder.parent.parent).tokenizer


def _cache_folder(cache_dir: str | Path | None, base: str | None, name: str | None) -> tuple[Path, str]:
    """The folder of a pretrain cache, and its name. Raises ValueError if `base` or `name` contradicts `cache_dir`."""
    from niels_gpt.cache.remote import local_folder
    from niels_gpt.system.urls import is_url

    if cache_dir is None:
        if base is None:
            raise ValueError("pass cache_dir, the folder of a pretrain cache, or a config with base and dataset_name")
        from niels_gpt.cache.folder import CacheFolder

        caches = CacheFolder(base)
        have = caches.names("pretrain")
        if name is None and len(have) == 1:
            name = have[0]
        if name not in have:
            raise ValueError(f"dataset_name={name!r}: {base} has these pretrain caches: {', '.join(have) or 'none'}")
        return caches.path / "pretrain" / str(name), str(name)
    given = str(cache_dir) if is_url(cache_dir) else str(Path(cache_dir).resolve())
    caches_of, _, named = given.rstrip("/").rpartition("/")
    if name is not None and named != name:
        raise ValueError(f"dataset_name={name!r}, but cache_dir is {cache_dir}: pass only one of them")
    if base is not None and (base if is_url(base) else str(Path(base).resolve())) != caches_of.rpartition("/")[0]:
        raise ValueError(f"base={base!r}, but cache_dir is {cache_dir}: pass only one of them")
    return local_folder(cache_dir), named


def tokenizer_hash(path: str) -> str:
    """The sha256 of a tokenizer (spm.model, or its folder). Raises ValueError if there is none."""
    from niels_gpt.tokenizer import load_tokenizer

    try:
        return str(load_tokenizer(path).sha256)
    except FileNotFoundError:
        raise ValueError(
            f"splice.tokenizer={path!r}: no such spm.model. Documents of a token cache keep its tokenizer: leave this "
            "out, or give the spm.model of the cache to have it checked. Hugging Face tokenizers: niels_gpt.levanter"
        ) from None
