"""Rows of JSON files: .jsonl, .json (a list, or one object after another), their .gz, and chat exports in a .zip.

User files are read here and not with `datasets`: pyarrow needs the same types in every row, while chat files mix
strings and lists, and would make a column of every message id in an export of ChatGPT. A file is read as a stream.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from niels_gpt.data.reading.diagnose import explain
from niels_gpt.data.reading.local import suffix
from niels_gpt.data.split import shuffled
from niels_gpt.system.json_text import NestedTooDeeply, check_nesting, parse_json

SUFFIXES = (".jsonl", ".json", ".zip")
"""Formats that this module reads, as `local.suffix` returns them."""
MOST_ZIP_BYTES = 8 << 30
"""Largest conversations.json that is read from a .zip, uncompressed."""
SHUFFLED_ROWS = 10_000
"""Rows kept in memory by `shuffled_rows`."""

_EXPORT = re.compile(r"conversations([-_]\d+)?\.json")
_BESIDE_EXPORT = {"user.json", "users.json", "chat.html"}
_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")
_parse = json.JSONDecoder().raw_decode

Row = dict[str, Any]


def iter_json_rows(paths: Iterable[str | Path], *, errors: str = "strict") -> Iterator[tuple[int, Row]]:
    """Yield (row number, row) of the files in order.

    `errors` "replace" inserts U+FFFD for bytes that are not utf-8. Raises ValueError with the file and the line for
    anything else that cannot be read.
    """
    errors = "replace" if errors == "replace" else "strict"
    number = itertools.count()
    for path in map(Path, paths):
        empty = True
        for row in _file_rows(path, errors):
            yield next(number), row
            empty = False
        if empty:
            raise ValueError(f"cannot read {path}: it has no rows")


def shuffled_rows(read: Callable[[], Iterator[tuple[int, Row]]], seed: int) -> Iterator[tuple[int, Row]]:
    """Yield the rows in a random order that depends on the seed; reads them once to count, then once per block."""
    order = shuffled(range(sum(1 for _ in read())), seed)
    for start in range(0, len(order), SHUFFLED_ROWS):
        block = order[start : start + SHUFFLED_ROWS]
        wanted = set(block)
        rows = {number: row for number, row in read() if number in wanted}
        yield from ((number, rows[number]) for number in block)


def without_export_extras(paths: Sequence[str]) -> list[str]:
    """Return the files of a folder; of an unpacked chat export, only its conversations (not user.json and others)."""
    by_folder: dict[Path, list[str]] = {}
    for name in paths:
        by_folder.setdefault(Path(name).parent, []).append(name)
    kept = []
    for folder, names in by_folder.items():
        conversations = [name for name in names if _EXPORT.fullmatch(Path(name).name)]
        is_export = conversations and any((folder / name).exists() for name in _BESIDE_EXPORT)
        kept += conversations if is_export else names
    return sorted(kept)


def is_chat_export(path: Path) -> bool:
    """Whether a .zip holds the conversations of a chat export. Raises ValueError if it is damaged."""
    with _explained(path), zipfile.ZipFile(path) as archive:
        return bool(_conversations(archive))


# --- one file ----------------------------------------------------------------------------------------


def raw_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes that hold the rows of a file, uncompressed, a part at a time. Raises as `iter_json_rows` does."""
    with _explained(path):
        for file, _ in _parts(path):
            while chunk := file.read(_CHUNK):
                yield chunk


def _file_rows(path: Path, errors: str) -> Iterator[Row]:
    read = _lines if suffix(path) == ".jsonl" else _values
    with _explained(path):
        for file, where in _parts(path):
            yield from read(file, where, errors)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise ValueError for damaged compressed data."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError) as err:
        if suffix(path) == ".zip":
            raise ValueError(f"cannot read {path}: the zip data is damaged ({err}); download it again") from None
        raise ValueError(explain([path]) or f"cannot read {path}: {err}") from None


def _parts(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """Yield (open file, its name in errors): the file, or the conversations in an export; writes nothing to disk."""
    if suffix(path) != ".zip":
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file), str(path)
        return
    with zipfile.ZipFile(path) as archive:
        members = _conversations(archive)
        if not members:
            raise ValueError(
                f"{path} has no conversations.json: only exports of ChatGPT and Claude are read as .zip; "
                "unpack it first"
            )
        for info in members:
            if info.file_size > MOST_ZIP_BYTES:
                raise ValueError(
                    f"{path}: {info.filename} has {info.file_size:,} bytes, more than {MOST_ZIP_BYTES:,}: unpack it"
                )
            if info.flag_bits & 1:
                raise ValueError(f"cannot read {path}: {info.filename} is encrypted; unpack it first")
            with archive.open(info) as member:
                yield member, f"{path}, {info.filename}"


def _conversations(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files with conversations in an export, sorted by name."""
    members = [info for info in archive.infolist() if _EXPORT.fullmatch(info.filename.rpartition("/")[2])]
    members = [info for info in members if not info.filename.startswith("__MACOSX/")]
    return sorted(members, key=lambda info: info.filename)


def _lines(file: IO[bytes], where: str, errors: str) -> Iterator[Row]:
    """Yield the object of each line. A file that begins with [ is one list instead."""
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith(b"["):
            yield from _values(file, where, errors, start=line)
            return
        try:
            row = parse_json(line.decode("utf-8", errors))
        except UnicodeDecodeError as err:
            problem = f"is not utf-8 (byte {err.start} of the line); convert the file"
            raise ValueError(f"cannot read {where}: line {number} {problem}") from None
        except ValueError as err:
            problem = f"{_reason(err)}; repair or remove the line"
            raise ValueError(f"cannot read {where}: line {number} {problem}") from None
        if not isinstance(row, dict):
            raise _no_object(row, where, number)
        yield row


def _values(file: IO[bytes], where: str, errors: str, *, start: bytes = b"") -> Iterator[Row]:
    """Yield the objects of one list, or objects that follow each other; `start` are bytes that were already read."""
    decode = codecs.getincrementaldecoder("utf-8-sig")(errors).decode
    text, at, lines, ended, listed = decode(start), 0, 0, False, None  # `lines` come before `text`
    while True:
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it also matches nothing
        if at < len(text):
            if listed is None:
                listed = text[at] == "["
                at += listed
                continue
            if listed and text[at] == "]":
                return
            try:
                row, end = _parse(text, at)
                check_nesting(row)
            except (ValueError, RecursionError) as err:
                if ended or not isinstance(err, json.JSONDecodeError):
                    line = lines + text.count("\n", 0, getattr(err, "pos", at)) + 1
                    problem = f"{_reason(err)}; repair the file, or download it again"
                    raise ValueError(f"cannot read {where}: line {line} {problem}") from None
            else:
                if not isinstance(row, dict):
                    raise _no_object(row, where, lines + text.count("\n", 0, at) + 1)
                yield row
                at = end
                continue
        if ended:
            if listed:
                raise ValueError(f"cannot read {where}: its list is not closed, so it is truncated; download it again")
            return
        # Read at least as much as is left: an object of any size is then parsed a few times, not once per chunk.
        data = file.read(max(_CHUNK, len(text) - at))
        ended = not data
        lines += text.count("\n", 0, at)
        text, at = text[at:], 0
        try:
            text += decode(data, ended)
        except UnicodeDecodeError as err:
            line = lines + text.count("\n") + data.count(b"\n", 0, err.start) + 1
            raise ValueError(f"cannot read {where}: line {line} is not utf-8; convert the file") from None


def _reason(err: Exception) -> str:
    if isinstance(err, RecursionError | NestedTooDeeply):
        return f"is {NestedTooDeeply()}"
    return f"is not JSON ({getattr(err, 'msg', err)})"


def _no_object(value: Any, where: str, line: int) -> ValueError:
    kind = type(value).__name__
    return ValueError(f"cannot read {where}: line {line} is not a JSON object but a {kind}; repair or remove it")
