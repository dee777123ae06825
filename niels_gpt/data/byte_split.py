"""Sources that are split by bytes (`SourceConfig.split`): one byte string, without any change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.config import NotesConfig, SourceConfig
from niels_gpt.data.note_selection import SelectedNotes
from niels_gpt.data.reading.hub import TABLE_ROWS, HubRequest, open_dataset
from niels_gpt.data.reading.local import ROW_SUFFIXES, DataUnavailable, find_local, split_of, suffix
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.reading.utf8 import decode_utf8, utf8_problem
from niels_gpt.data.row_layout import text_column
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.user_files import (
    holds_text_files,
    path_of_source,
    read_file,
    row_files,
    select_by_name,
    user_file_paths,
)

HUB = "hub:"
ORDER = ("train", "validation", "test")
"""Order of files and splits with these names; a file with another name belongs to train."""


class ByteChunk(NamedTuple):
    """The bytes of a file, or of the text of a row."""

    name: str
    data: bytes


def hub_dataset(config: SourceConfig) -> tuple[str, str | None] | None:
    """Return (id, revision) of a source whose path is hub:ID or hub:ID@REVISION; None for other paths."""
    if not config.path.startswith(HUB):
        return None
    dataset_id, _, revision = config.path.removeprefix(HUB).partition("@")
    return dataset_id, revision or None


def byte_split_files(name: str, config: SourceConfig, notes: NotesConfig | None = None) -> list[str]:
    """Return the sorted local files of a source; empty if it comes from the Hub."""
    path = _local_path(name, config)
    return [] if path is None else user_file_paths(name, SourceConfig(str(path)), notes)


def select_byte_split(name: str, config: SourceConfig, notes: NotesConfig) -> SelectedNotes | None:
    """Return which files of a source are read and skipped; None if it is one file or comes from the Hub."""
    path = _local_path(name, config)
    return None if path is None or path.is_file() else select_by_name(path, notes)


def byte_chunks(name: str, config: SourceConfig, notes: NotesConfig | None = None) -> Iterator[ByteChunk]:
    """Yield the non-empty chunks of a source in order; joined, they are its bytes.

    Plain files are not decoded; of rows, only the text is used. `notes` selects files of a folder by their names.
    Raises ValueError or OSError for unreadable input.
    """
    path = _local_path(name, config)
    if path is None or _holds_rows(path, notes):
        chunks = _rows(name, config, path, notes)
    elif path.is_dir():
        files = sorted(user_file_paths(name, SourceConfig(str(path)), notes), key=_by_split)
        chunks = (ByteChunk(Path(file).relative_to(path).as_posix(), read_file(Path(file))) for file in files)
    else:
        chunks = iter([ByteChunk(path.name, read_file(path))])
    return (chunk for chunk in chunks if chunk.data)


def bytes_between(chunks: Sequence[ByteChunk], first: int, end: int) -> tuple[bytes, list[str], list[int]]:
    """Return (data, names, offsets): bytes first .. end - 1 of the joined chunks, and the chunks that they touch.

    The offsets are where each chunk begins in `data`. A chunk that begins before `first` has its first byte in its
    name.
    """
    data, names, offsets, begin = [], [], [], 0
    for chunk in chunks:
        skipped = max(first - begin, 0)
        inside = chunk.data[skipped : max(end - begin, 0)]
        if inside:
            data.append(inside)
            names.append(f"{chunk.name} from byte {skipped}" if skipped else chunk.name)
            offsets.append(begin + skipped - first)
        begin += len(chunk.data)
    return b"".join(data), names, offsets


def iter_byte_split(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 42,
    take: int | None = None,
    errors: str = "strict",
    notes: NotesConfig | None = None,
) -> Iterator[PretrainSample]:
    """Yield the chunks of a source as texts, at most `take`, for `data show` and `data stats`.

    Raises ValueError for a chunk that is not utf-8 (errors="skip" leaves it out), and for a split other than train:
    `config.split` applies later.
    """
    check_take(take)
    if split != "train":
        raise ValueError(f"{name} has no split {split!r}: it is split by bytes (data.sources.{name}.split); use train")
    chunks = byte_chunks(name, config, notes)
    chunks = iter(shuffled(list(chunks), seed)) if shuffle else chunks
    if errors == "skip":
        chunks = (chunk for chunk in chunks if utf8_problem(chunk.data) is None)
    for chunk in itertools.islice(chunks, take):
        text = decode_utf8(chunk.data, where=f"{name}, {chunk.name},", errors=errors)
        yield PretrainSample(text, name, {"piece": chunk.name})


def _local_path(name: str, config: SourceConfig) -> Path | None:
    """Return the local file or folder of a source; None if it comes from the Hub."""
    dataset = hub_dataset(config)
    return path_of_source(name, config) if dataset is None else find_local(dataset[0])


def _holds_rows(path: Path, notes: NotesConfig | None) -> bool:
    return suffix(path) in ROW_SUFFIXES if path.is_file() else not holds_text_files(path, notes)


def _by_split(path: str) -> tuple[int, str]:
    split = split_of(Path(path).name)
    return ORDER.index(split) if split in ORDER else 0, path


def _rows(name: str, config: SourceConfig, path: Path | None, notes: NotesConfig | None) -> Iterator[ByteChunk]:
    dataset_id, revision = hub_dataset(config) or (name, None)
    only = None if path is None else row_files(path, notes)
    request = HubRequest(dataset_id, None, None, path=path, revision=revision, only=only)
    try:
        tables = open_dataset(request)
    except DataUnavailable as err:
        raise DataUnavailable(f"{err}. To train: --source {name}=PATH{_script_hint(config, err)}") from err
    other = [split for split in tables if split not in ORDER]
    if other:
        raise ValueError(
            f"{request} has a split {other[0]!r}: only train, validation and test can be joined; give the path of one "
            "file"
        )
    several = len(tables) > 1
    for split in sorted(tables, key=ORDER.index):
        for number, text in enumerate(_texts(tables[split], config.field, name)):
            yield ByteChunk(f"{split} row {number}" if several else f"row {number}", text.encode("utf-8"))


def _texts(table: Any, field: str, name: str) -> Iterator[str]:
    """Yield the text of every row, from the same field; "" for null. Raises ValueError if there is no text field."""
    if not len(table):
        return
    columns = table.column_names
    strings = [column for column, value in table[0].items() if isinstance(value, str)]
    key = field or text_column(columns, strings, name)
    if key not in columns:
        raise ValueError(f"{name}: the rows have no field {key!r}; they have {', '.join(columns)}")
    for start in range(0, len(table), TABLE_ROWS):
        column: Sequence[Any] = table[start : start + TABLE_ROWS][key]
        for number, text in enumerate(column, start):
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"{name}: {key!r} of row {number} must be text, got {type(text).__name__}: split needs text"
                )
            yield text or ""


def _script_hint(config: SourceConfig, err: Exception) -> str:
    """Return a hint for a dataset that is a script, which `datasets` no longer runs; otherwise ""."""
    if "scripts are no longer supported" not in str(err) or "@" in config.path:
        return ""
    return f", or {config.path}@refs/convert/parquet, which holds the rows of such datasets"
