"""Rows of files at a URL (fsspec), read in parts: by threads of this process, or by the nodes of a cluster.

A part is a row group of a .parquet file, about a megabyte of lines of a .jsonl file, or a whole file of another format.
Reading a part depends on nothing but its description, so it can be done anywhere, and again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.data.reading.json_rows import iter_json_rows
from niels_gpt.data.reading.local import ROW_SUFFIXES, DataUnavailable, choose_split, split_of
from niels_gpt.system.urls import join, open_url, url_errors

TEXT_SUFFIXES = (".md", ".txt", ".txt.gz")
PART_BYTES = 1 << 20
"""Bytes of lines per part of a .jsonl file."""


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


def parts_of(files: list[UrlFile]) -> Iterator[FilePart]:
    """The parts of files, in order. Raises OSError or ValueError for a file that cannot be opened."""
    for file in files:
        lower = file.url.lower()
        if lower.endswith(".parquet"):
            yield from (FilePart(file, "parquet", group) for group in range(_row_groups(file)))
        elif lower.endswith(".jsonl") and file.bytes and not _is_list(file):
            yield from (FilePart(file, "lines", start) for start in range(0, file.bytes, PART_BYTES))
        else:
            yield FilePart(file, "text" if lower.endswith(TEXT_SUFFIXES) else "rows")


def holds_texts(files: list[UrlFile]) -> bool:
    """Whether the files are texts, not rows."""
    return files[0].url.lower().endswith(TEXT_SUFFIXES)


def read_part(part: FilePart, errors: str = "strict") -> list[dict[str, Any]]:
    """The rows of a part; of a text file one row {"data": its bytes, uncompressed}.

    Raises ValueError for a file that is damaged or differs from the one that was listed, OSError if it cannot be read.
    """
    filesystem, path = _open(part.file)
    with url_errors(part.file.url, "read"):
        if part.kind == "parquet":
            return _read_parquet(filesystem, path, part)
        if part.kind == "lines":
            from fsspec.utils import read_block

            with filesystem.open(path, "rb") as file:
                data = read_block(file, part.start, PART_BYTES, delimiter=b"\n")
            if not data.strip():
                return []
        else:
            data = filesystem.cat_file(path)
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


def hash_file(file: UrlFile) -> str:
    """The sha256 of a file."""
    filesystem, path = _open(file)
    digest = hashlib.sha256()
    with url_errors(file.url, "read"), filesystem.open(path, "rb") as source:
        while data := source.read(1 << 22):
            digest.update(data)
    return digest.hexdigest()


def first_rows(files: list[UrlFile], number: int, errors: str = "strict") -> list[dict[str, Any]]:
    """The first rows of files."""
    rows = itertools.chain.from_iterable(read_part(part, errors) for part in parts_of(files))
    return list(itertools.islice(rows, number))


def _filesystem(url: str) -> tuple[Any, str]:
    """(file system, path) of a URL; answers of the Hub are checked for their length."""
    if url.startswith("hf://"):
        from niels_gpt.data.reading.hub_files import check_files

        check_files()
    return open_url(url)


def _open(file: UrlFile) -> tuple[Any, str]:
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
        if file.process != _this_process() and file.url.startswith(("file://", "local://", "memory://")):
            remedy = (
                f"on the node {socket.gethostname()}: the folder is not shared with it; mount it on every node, use a "
                "URL that all nodes can read, or give the path without file://, which this machine then reads"
            )
            raise ValueError(f"{file.url} {problem} {remedy}")
        raise ValueError(f"{file.url} {problem}: it has changed since it was listed; start again")
    return filesystem, path


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _row_groups(file: UrlFile) -> int:
    filesystem, path = _open(file)
    with url_errors(file.url, "read"), filesystem.open(path, "rb") as source:
        return int(_parquet(source, file.url).num_row_groups)


def _read_parquet(filesystem: Any, path: str, part: FilePart) -> list[dict[str, Any]]:
    with filesystem.open(path, "rb") as source:
        opened = _parquet(source, part.file.url)
        try:
            rows: list[dict[str, Any]] = opened.read_row_group(part.start, use_threads=False).to_pylist()
        except Exception as err:
            raise ValueError(f"cannot read {part.file.url}: row group {part.start} is damaged ({err})") from None
    return rows


def _parquet(source: Any, url: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(source)
    except pyarrow.ArrowInvalid as err:
        raise ValueError(f"cannot read {url}: it is damaged, or no parquet file ({str(err).splitlines()[0]})") from None


def _is_list(file: UrlFile) -> bool:
    """Whether a .jsonl file is one JSON list, which cannot be read in parts."""
    filesystem, path = _open(file)
    with url_errors(file.url, "read"):
        start = filesystem.cat_file(path, 0, min(file.bytes, 256)) if file.bytes else b""
    return bool(start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))
