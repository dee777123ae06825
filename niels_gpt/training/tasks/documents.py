"""Access to single documents: splice runs choose from them, memorization reports measure them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.config import RunConfig
from niels_gpt.data.note_selection import SelectedNotes
from niels_gpt.splice.documents import ArrayDocuments, CacheDocuments, Documents, tokenizer_hash
from niels_gpt.streams import Stream, load_streams
from niels_gpt.system import files
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, fits
from niels_gpt.training.tasks.byte_task import SOURCES, selections_of, source_paths, stream_config
from niels_gpt.training.tasks.token_caches import build_command, open_caches


class DocumentSet(Protocol):
    """The documents of one source and split."""

    lengths: np.ndarray
    """(N,) int64: the number of tokens of each document."""
    ends: np.ndarray
    """(N,) int64: the end offset of each document in the source's stream."""
    sha256: str
    """The hash of the stream."""

    def name(self, i: int) -> str:
        """The name of document i."""

    def file(self, i: int) -> str | None:
        """The path of the file that document i was read from; None if that is not known."""

    def ids(self, i: int) -> np.ndarray:
        """The tokens of document i."""

    def documents(self, indices: Sequence[int]) -> Documents:
        """A selection of documents, for a splice dataset."""


@dataclass(frozen=True)
class SourceDocuments:
    """The documents of a source, by split."""

    source: str
    path: str
    unit: str
    """The unit of lengths: `B` for bytes, else ` tokens`."""
    tokenizer: AnyTokenizer
    train: DocumentSet
    held_out: DocumentSet
    selections: dict[str, SelectedNotes] = field(default_factory=dict)
    """Which files of the source were read and skipped; empty for token caches."""


class ByteDocumentSet:
    """Documents of a byte stream, without the separators between them."""

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

    def file(self, i: int) -> str | None:
        return None if self._names is None or not Path(self._names[i]).is_absolute() else self._names[i]

    def ids(self, i: int) -> np.ndarray:
        return self._data[self._starts[i] : self.ends[i]]

    def documents(self, indices: Sequence[int]) -> Documents:
        return ArrayDocuments([self.ids(i) for i in indices], indices=indices)


class TokenDocumentSet:
    """Documents of a token cache, read from disk on access. Each ends with one EOT.

    Reading a document with an id past the vocabulary raises CacheError.
    """

    def __init__(self, stream: TokenStream, sha256: str, vocabulary: int) -> None:
        """Raises CacheError for a cache without documents.npy."""
        self._stream, self._vocabulary = stream, vocabulary
        self.lengths = stream.document_lengths()
        self.ends = np.cumsum(self.lengths)
        self.sha256 = sha256

    def name(self, i: int) -> str:
        return f"document {i}"

    def file(self, i: int) -> str | None:
        return None

    def ids(self, i: int) -> np.ndarray:
        ids = self._stream.document(i)
        self._stream.check_document(i, ids, self._vocabulary)
        return ids

    def documents(self, indices: Sequence[int]) -> Documents:
        return CacheDocuments(self._stream, indices, vocabulary=self._vocabulary)


def uses_bytes(config: RunConfig) -> bool:
    """Whether the tokens of a run are bytes."""
    return config.task == "bytes" or (config.task == "splice" and config.splice.documents == "bytes")


def check_vocabulary(config: RunConfig, tokenizer: AnyTokenizer, path: str) -> None:
    """Raise ValueError if model.V does not fit the tokenizer of `path` (see `fits`)."""
    V = tokenizer.vocab_size
    if not fits(tokenizer, config.model.V):
        raise ValueError(f"model.V={config.model.V}, but the tokenizer of {path} has {V} ids: set model.V={V}")


def open_documents(config: RunConfig, source: str | None = None) -> SourceDocuments:
    """The documents of a source that a config can train on. Raises ValueError if there is no such source.

    source: by default splice.dataset_name, else the only source there is, else roam."""
    name = source or config.splice.dataset_name
    if uses_bytes(config):
        for option in ("base", "tokenizer"):
            if getattr(config.splice, option) is not None:
                raise ValueError(
                    f"splice.{option} needs splice.documents=tokens: documents of bytes come from a source "
                    "(data.roam, data.wiki, data.sources) without a token cache or a tokenizer"
                )
        return _byte_documents(config, name or "roam")
    folder = open_caches(config)
    have = folder.names("pretrain")
    if name is None:
        if len(have) != 1 and "roam" not in have:
            listed = ", ".join(have) or "none"
            raise ValueError(f"{folder.path} has these pretrain caches: {listed}; choose one with splice.dataset_name")
        name = have[0] if len(have) == 1 else "roam"
    if name not in have:
        raise ValueError(
            f"no pretrain cache {name} in {folder.path}: build it "
            f"({build_command(config, [name])}), "
            f"or set splice.dataset_name to an existing one: {', '.join(have) or 'none'}"
        )
    if config.splice.tokenizer is not None and tokenizer_hash(config.splice.tokenizer) != folder.tokenizer.sha256:
        raise ValueError(
            f"splice.tokenizer={config.splice.tokenizer!r} is not the tokenizer of {folder.path}: leave it out, or "
            "build the cache with it"
        )
    train, held_out = (_token_documents(folder, name, split) for split in ("train", "val"))
    return SourceDocuments(name, str(folder.path / "pretrain" / name), " tokens", folder.tokenizer, train, held_out)


def _token_documents(folder: CacheFolder, name: str, split: str) -> DocumentSet:
    path, tokenizer = folder.path / "pretrain" / name / split, folder.tokenizer
    if not path.is_dir():
        return EmptyDocumentSet()
    stream = TokenStream(path, tokenizer_sha256=tokenizer.sha256)
    return TokenDocumentSet(stream, stream.fingerprint(), tokenizer.vocab_size)


class ChatDocumentSet:
    """The conversations of an SFT cache, each as the ids of its chat template."""

    def __init__(self, dataset: SFTExampleDataset, sha256: str) -> None:
        self._dataset = dataset
        self.lengths, self.ends = np.diff(dataset.bounds), dataset.bounds[1:]
        self.sha256 = sha256

    def name(self, i: int) -> str:
        return f"conversation {i}"

    def file(self, i: int) -> str | None:
        return None

    def ids(self, i: int) -> np.ndarray:
        return self._dataset.example(i)

    def documents(self, indices: Sequence[int]) -> Documents:
        return ArrayDocuments([self.ids(i) for i in indices], indices=indices)


def open_chats(config: RunConfig, source: str | None) -> SourceDocuments:
    """The conversations of an SFT cache that a config trains on. Raises CacheError if there is no such cache."""
    folder = open_caches(config)
    name = source or ""
    folder.check("sft", [name], option="train.p_train")

    def opened(split: str) -> DocumentSet:
        if not (folder.path / "sft" / name / f"{split}_tokens.bin").is_file():
            return EmptyDocumentSet()
        dataset = folder.sft(name, split, T=config.model.T)
        return ChatDocumentSet(dataset, dataset.fingerprint())

    path = str(folder.path / "sft" / name)
    return SourceDocuments(name, path, " tokens", folder.tokenizer, opened("train"), opened("val"))


class EmptyDocumentSet:
    """A split without documents."""

    lengths = ends = np.empty(0, dtype=np.int64)
    sha256 = ""

    def name(self, i: int) -> str:
        raise IndexError(i)

    def file(self, i: int) -> str | None:
        raise IndexError(i)

    def ids(self, i: int) -> np.ndarray:
        raise IndexError(i)

    def documents(self, indices: Sequence[int]) -> Documents:
        raise IndexError(indices)


def _byte_documents(config: RunConfig, name: str) -> SourceDocuments:
    known = (*SOURCES, *config.data.sources)
    if name not in known:
        raise ValueError(f"unknown source {name!r}; known sources: {', '.join(known)}")
    cfg = stream_config(config, [name])
    streams = load_streams(cfg, T=-1)[name]  # T=-1 allows an empty val stream, as of a folder with one note
    train_set, held_out = (ByteDocumentSet(streams[split]) for split in ("train", "val"))
    return SourceDocuments(
        name, source_paths(cfg)[name], "B", ByteTokenizer(), train_set, held_out, selections_of({name: streams})
    )


class ContentIndex:
    """Tests whether a token sequence is a document of a set. Reads only documents of the length asked for."""

    def __init__(self, documents: DocumentSet, indices: Sequence[int] | None = None) -> None:
        """`indices`: the documents to index; None: all."""
        self._documents = documents
        self._indices = np.arange(len(documents.lengths)) if indices is None else np.array(indices, dtype=np.int64)
        self._known: dict[int, set[bytes]] = {}

    def __contains__(self, ids: np.ndarray) -> bool:
        length = len(ids)
        if length not in self._known:
            same = self._indices[self._documents.lengths[self._indices] == length]
            self._known[length] = {content_key(self._documents.ids(i)) for i in same.tolist()}
        return content_key(ids) in self._known[length]


def content_key(ids: np.ndarray) -> bytes:
    """The hash of a document's tokens."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()


def digest_indices(indices: Iterable[int]) -> str:
    """The hash of a selection of documents."""
    return files.sha256_bytes(",".join(map(str, indices)).encode("utf-8"))
