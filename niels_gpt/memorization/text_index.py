"""The training text of one source on disk, with an index of its suffixes: finds where a passage comes from.

A folder of the user's cache, named by the content that was trained on:

    text.bin        the documents as utf-8 bytes, SEPARATOR between them and in place of special tokens
    documents.npy   the offset of each document in text.bin
    suffixes.bin    the order of the suffixes; see suffix_search.py
    held_out.json   passages of the held-out documents: what overlap is usual
    meta.json       source, names of the documents, sizes and checksums; written last

The text is a copy because token caches hold no text, and because notes and caches change after a training: the index
is of what the run was trained on. An index that is damaged or incomplete is built again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from niels_gpt.memorization.membership import RunSource
from niels_gpt.memorization.progress import Progress, ProgressBar, no_progress
from niels_gpt.memorization.suffix_search import (
    DEPTH,
    PAD,
    POSITION_DTYPE,
    SEPARATOR,
    SuffixSearch,
    segment_slices,
    sort_segment,
)
from niels_gpt.system import files, user_cache
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.executors import ThreadExecutor, default_workers
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer
from niels_gpt.training.tasks.documents import DocumentSet

FORMAT_VERSION = 1
DENSE_BYTES = 16 << 20
"""A text of up to this size has a suffix at every byte."""
STRIDE = 8
"""Bytes between the suffixes of a larger text: its index is half as large as the text."""
EXCERPTS = 32
"""Held-out passages of a source."""
EXCERPT_BYTES = 2000
_EXCERPT_TOKENS = 500
_BATCH = 1 << 20
"""Tokens decoded at a time."""
_FILES = ("text.bin", "documents.npy", "suffixes.bin")


class Passage(NamedTuple):
    """A passage of the training text."""

    source: str
    document: str
    file: str | None
    """The file that the document was read from, where that is known."""
    offset: int
    """Of the passage in its document, in bytes."""
    before: str
    text: str
    after: str


class TextIndex:
    """An open index. Reads only, so threads can share it."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError or OSError if the index is missing, incomplete or damaged."""
        self.folder = folder
        self._meta = read_checked_json(folder / "meta.json")
        if self._meta.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"{folder} has another format")
        self.source: str = self._meta["source"]
        self.path: str = self._meta["path"]
        arrays = {name: _open(folder / name, self._meta["files"][name]) for name in _FILES}
        self._starts = np.load(folder / "documents.npy", allow_pickle=False)
        self._text = arrays["text.bin"]
        self.search = SuffixSearch(self._text, arrays["suffixes.bin"].view(POSITION_DTYPE), self._meta["stride"])
        self.held_out: list[str] = read_checked_json(folder / "held_out.json")["passages"]

    @property
    def key(self) -> str:
        """What identifies the content."""
        return self.folder.name

    @property
    def size(self) -> int:
        """Bytes of text."""
        return len(self._text) - 2 * len(PAD) - max(len(self._starts) - 1, 0) * len(SEPARATOR)

    def passage(self, position: int, length: int, context: int) -> Passage:
        """Return the passage of `length` bytes at a position of the text, with `context` characters on both sides."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        begin, end = self._bounds(number)
        stop = position + length
        before = self._decode(max(position - 4 * context, begin), position)
        after = self._decode(stop, min(stop + 4 * context, end))
        name, file = self._name(number)
        return Passage(
            source=self.source,
            document=name,
            file=file,
            offset=position - begin,
            before=before[len(before) - min(context, len(before)) :],
            text=self._decode(position, stop),
            after=after[:context],
        )

    def _bounds(self, number: int) -> tuple[int, int]:
        """[begin, end) of a document in the text."""
        last = number + 1 == len(self._starts)
        end = len(self._text) - len(PAD) + len(SEPARATOR) if last else int(self._starts[number + 1])
        return int(self._starts[number]), end - len(SEPARATOR)

    def _decode(self, begin: int, end: int) -> str:
        return self._text[begin:end].tobytes().replace(SEPARATOR, b"\n").decode("utf-8", errors="ignore")

    def _name(self, number: int) -> tuple[str, str | None]:
        names = self._meta["names"]
        return (f"{names} {number}", None) if isinstance(names, str) else tuple(names[number])


def index_key(source: str, fingerprint: Mapping[str, str], tokenizer_sha256: str | None) -> str:
    """The name of the folder of an index: a hash of what it is built from."""
    hashes = {name: sha for name, sha in fingerprint.items() if name != "tokenizer"}
    built_from = [FORMAT_VERSION, source, hashes, tokenizer_sha256]
    return files.sha256_bytes(json.dumps(built_from, sort_keys=True).encode("utf-8"))[:32]


def open_index(key: str) -> TextIndex | None:
    """Open an index of the user's cache folder; None if it is missing, incomplete or damaged."""
    folder = user_cache.cache_folder() / user_cache.INDEXES / key
    try:
        index = TextIndex(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    user_cache.mark_used(folder)
    return index


def build_index(source: RunSource, progress: ProgressBar = no_progress) -> TextIndex:
    """Build the index of a source, and open it. Raises OSError if it cannot be written, ValueError for damaged data."""
    key = index_key(source.name, source.fingerprint, source.tokenizer.sha256)
    folder = user_cache.private_folder(user_cache.INDEXES, key)
    with files.lock_folder(folder):
        index = open_index(key)  # another process may have built it meanwhile
        if index is None:
            _build(folder, source, progress)
            index = TextIndex(folder)
    return index


def _build(folder: Path, source: RunSource, progress: ProgressBar) -> None:
    decode = _Decoder(source.tokenizer)
    lengths = source.train.lengths[np.asarray(source.chosen, dtype=np.int64)]
    title = f"indexing {source.name}"
    listed: dict[str, Any] = {}
    starts: list[int] = [len(PAD)]
    with progress(f"{title}: reading text") as report:
        listed["text.bin"] = _write(
            folder / "text.bin", _text_chunks(source.train, source.chosen, decode, starts, report, int(lengths.sum()))
        )
    np.save(offsets := io.BytesIO(), np.array(starts[:-1], dtype=np.int64))
    listed["documents.npy"] = _write(folder / "documents.npy", [offsets.getvalue()])
    stride = 1 if listed["text.bin"]["bytes"] <= DENSE_BYTES else STRIDE
    with progress(f"{title}: sorting") as report:
        listed["suffixes.bin"] = _write(folder / "suffixes.bin", _sorted_segments(folder / "text.bin", stride, report))
    write_checked_json(folder / "held_out.json", {"passages": _excerpts(source.held_out, decode)})
    meta = {
        "format_version": FORMAT_VERSION,
        "source": source.name,
        "path": source.path,
        "stride": stride,
        "names": _names(source.train, source.chosen),
        "files": listed,
    }
    write_checked_json(folder / "meta.json", meta)


def _text_chunks(
    documents: DocumentSet,
    chosen: Sequence[int],
    decode: _Decoder,
    starts: list[int],
    report: Progress,
    total: int,
) -> Iterator[bytes]:
    """Yield the bytes of text.bin; append to `starts` where each document ends and the next one would begin."""
    yield PAD
    done = waiting = 0
    batch: list[np.ndarray] = []
    for number, i in enumerate(chosen, start=1):
        batch.append(documents.ids(i))
        waiting += len(batch[-1])
        if waiting >= _BATCH or number == len(chosen):
            text, sizes = decode.documents(batch)
            starts.extend((starts[-1] + np.cumsum(sizes)).tolist())
            done, waiting, batch = done + waiting, 0, []
            report(done, total)
            yield text
    yield PAD[len(SEPARATOR) :] if starts[1:] else PAD


def _sorted_segments(path: Path, stride: int, report: Progress) -> Iterator[bytes]:
    """Yield the bytes of suffixes.bin. Segments are sorted at the same time on all cores, at most four."""
    size = path.stat().st_size

    def sort(part: tuple[int, int]) -> bytes:
        begin, end = part
        text = np.fromfile(path, dtype=np.uint8, offset=begin, count=min(end + DEPTH, size) - begin)
        return sort_segment(text, end - begin, stride).tobytes()

    executor = ThreadExecutor(min(default_workers() // 2 or 1, 4))
    for (_, end), order in executor.in_order(segment_slices(size, stride), sort):
        report(end, size)
        yield order


class _Decoder:
    """Turns ids into text, SEPARATOR in place of special tokens."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self.excerpt = EXCERPT_BYTES if isinstance(tokenizer, ByteTokenizer) else _EXCERPT_TOKENS
        """Tokens of a held-out passage."""
        special = set(tokenizer.special_token_ids().values())
        pieces = [SEPARATOR if i in special else piece for i, piece in enumerate(tokenizer.token_bytes)]
        pieces.append(SEPARATOR)  # the end of a document
        self._end = len(pieces) - 1
        self._sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._begins = np.cumsum(self._sizes) - self._sizes
        self._bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def documents(self, batch: Sequence[np.ndarray]) -> tuple[bytes, np.ndarray]:
        """(the text of documents, each with a separator at its end; their sizes)."""
        ends = np.cumsum([len(ids) + 1 for ids in batch])
        ids = np.empty(ends[-1], dtype=np.int64)
        for end, document in zip(ends.tolist(), batch, strict=True):
            ids[end - 1 - len(document) : end - 1] = document
            ids[end - 1] = self._end
        sizes = self._sizes[ids]
        after = np.cumsum(sizes)
        gather = np.arange(after[-1]) + np.repeat(self._begins[ids] - (after - sizes), sizes)
        return self._bytes[gather].tobytes(), np.diff(after[ends - 1], prepend=0)


def _names(documents: DocumentSet, chosen: Sequence[int]) -> str | list[tuple[str, str | None]]:
    """The name and file of each document; a word if they are called `WORD 0`, `WORD 1` and so on."""
    names = [(documents.name(i), documents.file(i)) for i in chosen]
    word = names[0][0].partition(" ")[0] if names else ""
    return word if all(each == (f"{word} {i}", None) for i, each in enumerate(names)) else names


def _excerpts(documents: DocumentSet, decode: _Decoder) -> list[str]:
    """Passages of documents at equal distances, or all of them if there is little text."""
    lengths = np.asarray(documents.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    width = decode.excerpt
    whole = total <= EXCERPTS * width
    spots = (ends - lengths).tolist() if whole else [total * (2 * k + 1) // (2 * EXCERPTS) for k in range(EXCERPTS)]
    passages = []
    for spot in spots:
        number = int(np.searchsorted(ends, spot, side="right"))
        if number == len(ends):  # an empty document at the end
            continue
        begin = max(min(spot - int(ends[number] - lengths[number]), int(lengths[number]) - width), 0)
        ids = documents.ids(number)[begin:][: None if whole else width]
        for piece in decode.documents([ids])[0].split(SEPARATOR):
            passages.append(piece.decode("utf-8", errors="ignore"))
    return [passage for passage in dict.fromkeys(passages) if passage]


def _write(path: Path, chunks: Iterable[bytes]) -> dict[str, Any]:
    """Write a file atomically; return its entry of the meta."""
    with files.atomic_write(path) as file:
        file.writelines(chunks)
    return _describe(path)


def _describe(path: Path) -> dict[str, Any]:
    """The entry of a file in the meta."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return {"bytes": file.tell(), "xxh3_64": digest.hexdigest()}


def _open(path: Path, listed: Mapping[str, Any]) -> np.ndarray:
    """The bytes of a file, memory-mapped, checked against its entry of the meta. Raises ValueError if they differ."""
    if _describe(path) != listed:
        raise ValueError(f"{path} is damaged")
    return np.memmap(path, dtype=np.uint8, mode="r")
