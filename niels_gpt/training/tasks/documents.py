"""Documents one by one: what a splice run chooses from, and what a memorisation report looks into."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.config import RunConfig
from niels_gpt.splice.documents import ArrayDocuments, CacheDocuments, Documents
from niels_gpt.streams import Stream, load_streams
from niels_gpt.system import files
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer
from niels_gpt.training.tasks.byte_task import SOURCES, places, stream_config


class DocumentSet(Protocol):
    """The documents of one source and split."""

    lengths: np.ndarray
    """(N,) int64: their numbers of tokens."""
    ends: np.ndarray
    """(N,) int64: where each ends in the source's stream."""
    sha256: str
    """Of all of them."""

    def name(self, i: int) -> str:
        """What document i is called."""

    def ids(self, i: int) -> np.ndarray:
        """The tokens of document i."""

    def documents(self, indices: Sequence[int]) -> Documents:
        """Some of them, for a splice dataset."""


@dataclass(frozen=True)
class SourceDocuments:
    """The documents of a source: to train on, and held out."""

    source: str
    place: str
    unit: str
    """Of a token: `B` for bytes, else ` tokens`."""
    tokenizer: AnyTokenizer
    train: DocumentSet
    held_out: DocumentSet


class ByteDocumentSet:
    """Documents of a byte stream, without what stands between them."""

    def __init__(self, stream: Stream) -> None:
        self._data = np.frombuffer(stream.data, dtype=np.uint8)
        self._names = stream.names
        starts = np.array(stream.starts, dtype=np.int64)
        ends = np.append(starts[1:], len(stream.data)) if len(starts) else starts
        ends[:-1] -= stream.gap
        self._starts, self.ends, self.lengths = starts, ends, ends - starts
        self.sha256 = stream.sha256

    def name(self, i: int) -> str:
        return f"row {i}" if self._names is None else Path(self._names[i]).name

    def ids(self, i: int) -> np.ndarray:
        return self._data[self._starts[i] : self.ends[i]]

    def documents(self, indices: Sequence[int]) -> Documents:
        return ArrayDocuments([self.ids(i) for i in indices])


class TokenDocumentSet:
    """Documents of a token cache; they stay on disk. Each ends with one EOT.

    Reading one with an id past the vocabulary raises CacheError.
    """

    def __init__(self, stream: TokenStream, sha256: str, vocabulary: int) -> None:
        """Raises CacheError for a cache without documents.npy."""
        self._stream, self._vocabulary = stream, vocabulary
        self.lengths = stream.document_lengths()
        self.ends = np.cumsum(self.lengths)
        self.sha256 = sha256

    def name(self, i: int) -> str:
        return f"document {i}"

    def ids(self, i: int) -> np.ndarray:
        ids = self._stream.document(i)
        self._stream.check_document(i, ids, self._vocabulary)
        return ids

    def documents(self, indices: Sequence[int]) -> Documents:
        return CacheDocuments(self._stream, indices, vocabulary=self._vocabulary)


def uses_bytes(config: RunConfig) -> bool:
    """Whether the tokens of a run are bytes."""
    return config.task == "bytes" or (config.task == "splice" and config.splice.documents == "bytes")


def check_vocabulary(config: RunConfig, tokenizer: AnyTokenizer, place: str) -> None:
    """Raise ValueError where the model has another number of ids than the tokenizer."""
    if tokenizer.vocab_size != config.model.V:
        raise ValueError(
            f"model.V={config.model.V}, but the tokenizer of {place} has {tokenizer.vocab_size} ids: set model.V to "
            "that"
        )


def open_documents(config: RunConfig, source: str | None = None) -> SourceDocuments:
    """The documents of a source that a config can train on; by default the one its splice section names, else the only
    one it has, or notes. Raises ValueError where there is none of that name."""
    name = source or config.splice.dataset_name
    if uses_bytes(config):
        return _byte_library(config, name or "roam")
    folder = CacheFolder(config.splice.base or config.data.token_cache)
    have = folder.names("pretrain")
    if name is None:
        if len(have) != 1 and "roam" not in have:
            listed = ", ".join(have) or "none"
            raise ValueError(f"which cache of {folder.path}? There are: {listed}; set splice.dataset_name")
        name = have[0] if len(have) == 1 else "roam"
    if name not in have:
        raise ValueError(
            f"no pretrain cache {name} in {folder.path}: build it (niels-gpt cache build {name} --cache-dir "
            f"{folder.path}), or set splice.dataset_name to one that is there: {', '.join(have) or 'none'}"
        )
    place = folder.path / "pretrain" / name
    shelves = [_token_shelf(folder, name, split) for split in ("train", "val")]
    return SourceDocuments(name, str(place), " tokens", folder.tokenizer, shelves[0], shelves[1])


def _token_shelf(folder: CacheFolder, name: str, split: str) -> DocumentSet:
    place, tokenizer = folder.path / "pretrain" / name / split, folder.tokenizer
    if not place.is_dir():
        return EmptyDocumentSet()
    stream = TokenStream(place, tokenizer_sha256=tokenizer.sha256)
    return TokenDocumentSet(stream, folder.fingerprint("pretrain", name, split), tokenizer.vocab_size)


class EmptyDocumentSet:
    """A split that has no documents."""

    lengths = ends = np.empty(0, dtype=np.int64)
    sha256 = ""

    def name(self, i: int) -> str:
        raise IndexError(i)

    def ids(self, i: int) -> np.ndarray:
        raise IndexError(i)

    def documents(self, indices: Sequence[int]) -> Documents:
        raise IndexError(indices)


def _byte_library(config: RunConfig, name: str) -> SourceDocuments:
    known = (*SOURCES, *config.data.sources)
    if name not in known:
        raise ValueError(f"unknown source {name!r}; the sources of bytes are {', '.join(known)}")
    only = {name: 1.0}
    train = dataclasses.replace(config.train, p_train=only, p_val=only)
    cfg = stream_config(dataclasses.replace(config, task="bytes", train=train))
    streams = load_streams(cfg, T=-1)[name]  # a folder with one note has none to hold out
    shelves = (ByteDocumentSet(streams[split]) for split in ("train", "val"))
    return SourceDocuments(name, places(cfg)[name], "B", ByteTokenizer(), *shelves)


class ContentIndex:
    """Documents of a shelf by what is in them; they are read when one as long is asked for."""

    def __init__(self, shelf: DocumentSet, indices: Sequence[int] | None = None) -> None:
        """`indices`: which documents; None: all."""
        self._shelf = shelf
        self._indices = np.arange(len(shelf.lengths)) if indices is None else np.array(indices, dtype=np.int64)
        self._known: dict[int, set[bytes]] = {}

    def __contains__(self, ids: np.ndarray) -> bool:
        length = len(ids)
        if length not in self._known:
            same = self._indices[self._shelf.lengths[self._indices] == length]
            self._known[length] = {content_key(self._shelf.ids(i)) for i in same.tolist()}
        return content_key(ids) in self._known[length]


def content_key(ids: np.ndarray) -> bytes:
    """What identifies a document, wherever it lies."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()


def digest_indices(parts: Iterable[int]) -> str:
    """What identifies a choice of documents."""
    return files.sha256_bytes(",".join(map(str, parts)).encode("utf-8"))
