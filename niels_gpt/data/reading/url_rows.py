"""Rows of files at a URL (fsspec), read in parts: by threads of this process, or by the nodes of a cluster.

A part is a row group of a .parquet file, about a megabyte of lines of a .jsonl file, or a whole file of another format.
Reading a part depends on nothing but its description, so it can be done anywhere, and again. Its rows come in pieces of
bounded size, each with the checksums of the blocks that were read for it: rows that come from other bytes than those
that were hashed are refused, even where a file of the same name and size differs between two machines.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from niels_gpt.data.reading.json_rows import iter_json_rows
from niels_gpt.data.reading.local import ROW_SUFFIXES, DataUnavailable, choose_split, split_of
from niels_gpt.system.urls import join, open_url, url_errors

TEXT_SUFFIXES = (".md", ".txt", ".txt.gz")
PART_BYTES = 1 << 20
"""Bytes of lines per part of a .jsonl file."""
PIECE_BYTES = 4 << 20
"""Bytes of rows per piece of a part, about."""
BLOCK_BYTES = 1 << 20
"""Bytes per checksum (xxh3_64): 80 MB of checksums for 10 TB."""


class UrlFile(NamedTuple):
    """A file at a URL, as this machine sees it."""

    url: str
    bytes: int
    process: str
    """The machine and process that listed it."""


class FilePart(NamedTuple):
    """What one task reads of a file."""

    file: UrlFile
    kind: str
    """parquet, lines, rows (a whole file of rows) or text (a whole file)."""
    start: int = 0
    """parquet: the row group; lines: the first byte."""
    pieces: int = 1
    """In how many pieces its rows are returned."""


class ReadBlocks(NamedTuple):
    """Checksums of the blocks of a file that were read."""

    process: str
    """The machine and process that read them."""
    checksums: dict[int, int]
    """Number of the block -> xxh3_64."""


class Piece(NamedTuple):
    """Some rows of a part, and the blocks that were read for them since the last piece."""

    rows: list[dict[str, Any]]
    blocks: ReadBlocks


class HashedFile(NamedTuple):
    """A file, and what it contained when it was hashed."""

    file: UrlFile
    process: str
    """The machine and process that hashed it."""
    sha256: str
    checksums: np.ndarray
    """The xxh3_64 of each block, uint64."""

    def check(self, read: ReadBlocks) -> None:
        """Raise ValueError if blocks that were read later or elsewhere differ from those that were hashed."""
        for block, checksum in read.checksums.items():
            if block >= len(self.checksums) or int(self.checksums[block]) != checksum:
                if read.process != self.process and is_local(self.file.url):
                    here, there = (process.rpartition(":")[0] for process in (read.process, self.process))
                    raise ValueError(
                        f"{self.file.url} on the node {here} is not what was hashed on the node {there}: it has "
                        f"changed since, or {NOT_SHARED}"
                    )
                raise ValueError(f"{self.file.url} has changed since it was hashed: start again")


NOT_SHARED = (
    "the folder is not shared; mount it on every node, use a URL that all nodes can read, or give the path without "
    "file://, which this machine then reads"
)


def list_url(url: str, split: str = "train") -> list[UrlFile]:
    """The files of a split at a URL, sorted. Raises DataUnavailable if there are none, OSError if it cannot be read."""
    filesystem, root = _filesystem(url)
    with url_errors(url, "list"):
        found = filesystem.find(root, detail=True)
    if not found:
        raise DataUnavailable(f"there is no file at {url}")
    me = _this_process()
    by_split: dict[str, list[UrlFile]] = {}
    base = filesystem._strip_protocol(root).rstrip("/")
    kinds = set()
    for path, entry in sorted(found.items()):
        parts = path.removeprefix(base).strip("/").split("/") if path != base else [path.rpartition("/")[2]]
        if any(part.startswith(".") for part in parts) or not path.lower().endswith((*ROW_SUFFIXES, *TEXT_SUFFIXES)):
            continue
        holds_rows = path.lower().endswith(ROW_SUFFIXES)
        kinds.add(holds_rows)
        name = "" if path == base else next(filter(None, map(split_of, reversed(parts))), None) or "train"
        file = UrlFile(url if path == base else join(url, *parts), int(entry["size"]), me)
        by_split.setdefault(name if holds_rows or not name else "train", []).append(file)
    if not by_split:
        known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
        raise DataUnavailable(f"{url} has no file of a known format; known formats are {known}")
    if len(kinds) > 1:  # as in a folder: beside rows, text files are not data
        rows = {name: [f for f in files if f.url.lower().endswith(ROW_SUFFIXES)] for name, files in by_split.items()}
        by_split = {name: files for name, files in rows.items() if files}
    names = choose_split({name: [file.url for file in files] for name, files in by_split.items()}, split, url)
    chosen = {file.url: file for files in by_split.values() for file in files}
    return [chosen[name] for name in names]


Check = Callable[[UrlFile, ReadBlocks], None]
"""Called with what was read of a file; raises ValueError if it is not what was hashed."""


def no_check(file: UrlFile, read: ReadBlocks) -> None:
    """The check of files that were not hashed."""


def parts_of(files: list[UrlFile], check: Check = no_check) -> Iterator[FilePart]:
    """The parts of files, in order. Raises OSError or ValueError for a file that cannot be opened."""
    for file in files:
        lower = file.url.lower()
        if lower.endswith(".parquet"):
            for group, size in enumerate(_row_groups(file, check)):
                yield FilePart(file, "parquet", group, _pieces(size))
        elif lower.endswith(".jsonl") and file.bytes and not _is_list(file, check):
            yield from (FilePart(file, "lines", start) for start in range(0, file.bytes, PART_BYTES))
        elif lower.endswith(TEXT_SUFFIXES):
            yield FilePart(file, "text")
        else:
            yield FilePart(file, "rows", pieces=_pieces(file.bytes))


def _pieces(size: int) -> int:
    return max(-(-size // PIECE_BYTES), 1)


def holds_texts(files: list[UrlFile]) -> bool:
    """Whether the files are texts, not rows."""
    return files[0].url.lower().endswith(TEXT_SUFFIXES)


def read_part(part: FilePart, errors: str = "strict") -> Iterator[Piece]:
    """The rows of a part, in `part.pieces` pieces; of a text file one row {"data": its bytes, uncompressed}.

    Raises ValueError for a file that is damaged or differs from the one that was listed, OSError if it cannot be read.
    """
    with _open(part.file) as source:
        if part.kind == "parquet":
            yield from _read_parquet(source, part)
            return
        rows = _read_rows(source, part, errors)
        step = -(-len(rows) // part.pieces)
        for number in range(part.pieces):
            yield Piece(rows[number * step : (number + 1) * step], source.take())


def _read_rows(source: BlockFile, part: FilePart, errors: str) -> list[dict[str, Any]]:
    if part.kind == "lines":
        from fsspec.utils import read_block

        data = read_block(source, part.start, PART_BYTES, delimiter=b"\n")
        if not data.strip():
            return []
    else:
        data = source.read()
    name = part.file.url.rpartition("/")[2]
    with tempfile.TemporaryDirectory() as folder:  # the readers of local files check and explain their content
        copy = Path(folder) / name
        copy.write_bytes(data)
        try:
            if part.kind == "text":
                from niels_gpt.data.user_files import read_file

                return [{"data": read_file(copy)}]
            return [row for _, row in iter_json_rows([copy], errors=errors)]
        except ValueError as err:
            where = part.file.url + (f" (from byte {part.start:,} on)" if part.start else "")
            raise ValueError(str(err).replace(str(copy), where)) from None


def hash_file(file: UrlFile) -> Iterator[HashedFile]:
    """One item: the sha256 of a file and the checksums of its blocks."""
    digest = hashlib.sha256()
    with _open(file) as source:
        while data := source.read(4 * BLOCK_BYTES):
            digest.update(data)
        process, checksums = source.take()
    in_order = np.array([checksums[block] for block in range(len(checksums))], dtype=np.uint64)
    yield HashedFile(file, process, digest.hexdigest(), in_order)


def check_sizes(files: list[UrlFile]) -> None:
    """Raise ValueError if this machine does not see files as they were listed, OSError if it cannot look."""
    for file in files:
        _check_size(file)


def first_rows(
    files: list[UrlFile], number: int, errors: str = "strict", check: Check = no_check
) -> list[dict[str, Any]]:
    """The first rows of files."""

    def rows() -> Iterator[dict[str, Any]]:
        for part in parts_of(files, check):
            for piece in read_part(part, errors):
                check(part.file, piece.blocks)
                yield from piece.rows

    return list(itertools.islice(rows(), number))


class BlockFile(io.RawIOBase):
    """A file that is read by whole blocks, of which it keeps the checksums. Errors are those of `url_errors`."""

    def __init__(self, source: Any, url: str, size: int) -> None:
        self._source, self._url, self._size = source, url, size
        self._position = 0
        self._last: tuple[int, bytes] = (-1, b"")
        self._checksums: dict[int, int] = {}

    def take(self) -> ReadBlocks:
        """What was read since the last call."""
        checksums, self._checksums = self._checksums, {}
        return ReadBlocks(_this_process(), checksums)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence], 0)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes; all that are left for -1."""
        rest = max(self._size - self._position, 0)
        end = self._position + (rest if size is None or size < 0 else min(size, rest))
        first, stop = self._position // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        blocks = [self._last[1]] if self._position < end and self._last[0] == first else []
        data = b"".join([*blocks, *self._read_blocks(first + len(blocks), stop)])
        start = self._position - first * BLOCK_BYTES
        length, self._position = end - self._position, end
        return data[start : start + length]

    def _read_blocks(self, first: int, stop: int) -> Iterator[bytes]:
        if first >= stop:
            return
        with url_errors(self._url, "read"):
            self._source.seek(first * BLOCK_BYTES)
            for block in range(first, stop):
                wanted = min(BLOCK_BYTES, self._size - block * BLOCK_BYTES)
                data = self._source.read(wanted)
                while len(data) < wanted and (more := self._source.read(wanted - len(data))):
                    data += more
                if len(data) < wanted:
                    raise OSError(f"it ends after {block * BLOCK_BYTES + len(data):,} of {self._size:,} bytes")
                self._checksums[block] = xxhash.xxh3_64_intdigest(data)
                self._last = (block, data)
                yield data

    def readline(self, size: int | None = -1) -> bytes:
        raise io.UnsupportedOperation("readline")

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def _filesystem(url: str) -> tuple[Any, str]:
    """(file system, path) of a URL; answers of the Hub are checked for their length."""
    if url.startswith("hf://"):
        from niels_gpt.data.reading.hub_files import check_files

        check_files()
    return open_url(url)


def _open(file: UrlFile) -> BlockFile:
    """Open a file that is the one that was listed. Raises as `_check_size` does."""
    filesystem, path = _check_size(file)
    with url_errors(file.url, "read"):
        return BlockFile(filesystem.open(path, "rb"), file.url, file.bytes)


def _check_size(file: UrlFile) -> tuple[Any, str]:
    """(file system, path) of a file that is the one that was listed.

    Raises ValueError if it is missing or has another size: it has changed, or a folder is not shared with this node.
    """
    filesystem, path = _filesystem(file.url)
    try:
        with url_errors(file.url, "read"):
            size = filesystem.size(path)
    except FileNotFoundError:
        size = None
    if size != file.bytes:
        problem = "is missing" if size is None else f"has {size:,} bytes instead of {file.bytes:,}"
        if file.process != _this_process() and is_local(file.url):
            raise ValueError(f"{file.url} {problem} on the node {socket.gethostname()}: {NOT_SHARED}")
        raise ValueError(f"{file.url} {problem}: it has changed since it was listed; start again")
    return filesystem, path


def is_local(url: str) -> bool:
    """Whether each machine has its own files at a URL, unless a folder is shared."""
    return url.startswith(("file://", "local://", "memory://"))


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _row_groups(file: UrlFile, check: Check) -> list[int]:
    """The bytes of each row group, uncompressed."""
    with _open(file) as source:
        metadata = _parquet(source, file.url).metadata
        check(file, source.take())
    return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def _read_parquet(source: BlockFile, part: FilePart) -> Iterator[Piece]:
    """The rows of a row group, decoded piece by piece."""
    opened = _parquet(source, part.file.url)
    step = max(-(-opened.metadata.row_group(part.start).num_rows // part.pieces), 1)
    try:
        batches = opened.iter_batches(batch_size=step, row_groups=[part.start], use_threads=False)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for _ in range(part.pieces):
            yield Piece(list(itertools.islice(rows, step)), source.take())
    except GeneratorExit:
        raise
    except Exception as err:
        raise ValueError(f"cannot read {part.file.url}: row group {part.start} is damaged ({err})") from None


def _parquet(source: Any, url: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(source, buffer_size=BLOCK_BYTES)  # by default it reads a whole column at once
    except pyarrow.ArrowInvalid as err:
        raise ValueError(f"cannot read {url}: it is damaged, or no parquet file ({str(err).splitlines()[0]})") from None


def _is_list(file: UrlFile, check: Check) -> bool:
    """Whether a .jsonl file is one JSON list, which cannot be read in parts."""
    with _open(file) as source:
        start = source.read(256)
        check(file, source.take())
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
