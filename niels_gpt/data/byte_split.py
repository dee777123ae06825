"""Sources that are cut by bytes (`SourceConfig.split`): one run of bytes, every one of them as it is."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.config import SourceConfig
from niels_gpt.data.reading.diagnose import explain
from niels_gpt.data.reading.hub import TABLE_ROWS, HubRequest, open_dataset
from niels_gpt.data.reading.local import (
    ROW_SUFFIXES,
    DataUnavailable,
    find_local,
    list_files,
    split_of,
    suffix,
)
from niels_gpt.data.reading.text_rows import check_take, text_key
from niels_gpt.data.roam import decode_utf8
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.user_files import (
    TEXT_SUFFIXES,
    holds_text_files,
    path_of_source,
    user_file_paths,
)

HUB = "hub:"
ORDER = ("train", "validation", "test")
"""Files and splits that are called so come in this order; a file that is called otherwise belongs to train."""
PACKED = (".zip", ".xz", ".bz2", ".zst", ".7z", ".rar", ".tar", ".tgz")


class ByteChunk(NamedTuple):
    """A file, or the text of a row."""

    name: str
    data: bytes


def hub_dataset(config: SourceConfig) -> tuple[str, str | None] | None:
    """(id, revision) of the dataset that a source is, where its path names one of the Hub."""
    if not config.path.startswith(HUB):
        return None
    dataset_id, _, revision = config.path.removeprefix(HUB).partition("@")
    return dataset_id, revision or None


def byte_split_files(name: str, config: SourceConfig) -> list[str]:
    """The local files that a source is read from, sorted; none where it comes from the Hub."""
    place = _local(name, config)
    return [] if place is None else user_file_paths(name, SourceConfig(str(place)))


def byte_chunks(name: str, config: SourceConfig) -> Iterator[ByteChunk]:
    """What a source consists of, in its order: joined, the pieces are its bytes. Those without any are left out.

    A plain file is not decoded; of rows the text is taken. Raises ValueError or OSError for what cannot be read.
    """
    place = _local(name, config)
    if place is None or _holds_rows(place):
        found = _rows(name, config, place)
    elif place.is_dir():
        paths = sorted(list_files(place, TEXT_SUFFIXES, visible_only=True), key=_by_split)
        found = (ByteChunk(Path(path).relative_to(place).as_posix(), _read(Path(path))) for path in paths)
    else:
        found = iter([ByteChunk(place.name, _read(place))])
    return (piece for piece in found if piece.data)


def bytes_between(found: Sequence[ByteChunk], first: int, end: int) -> tuple[bytes, list[str], list[int]]:
    """The bytes first .. end - 1 of the joined pieces, the name of each piece in them, and where it begins there.

    The name of one that begins before says which of its bytes comes first.
    """
    data, names, starts, begin = [], [], [], 0
    for piece in found:
        skipped = max(first - begin, 0)
        inside = piece.data[skipped : max(end - begin, 0)]
        if inside:
            data.append(inside)
            names.append(f"{piece.name} from byte {skipped}" if skipped else piece.name)
            starts.append(begin + skipped - first)
        begin += len(piece.data)
    return b"".join(data), names, starts


def iter_byte_split(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 42,
    take: int | None = None,
    errors: str = "strict",
) -> Iterator[PretrainSample]:
    """The pieces of a source as texts, at most `take`, for those who look at it: `data show` and `data stats`.

    Raises ValueError for one that is not utf-8, and for another split than train: `config.split` makes the parts.
    """
    check_take(take)
    if split != "train":
        raise ValueError(f"{name} has no split {split!r}: data.sources.{name}.split cuts it by bytes; it has train")
    found = shuffled(list(byte_chunks(name, config)), seed) if shuffle else byte_chunks(name, config)
    for piece in itertools.islice(found, take):
        text = decode_utf8(piece.data, where=f"{name}, {piece.name},", errors=errors)
        yield PretrainSample(text, name, {"piece": piece.name})


def _local(name: str, config: SourceConfig) -> Path | None:
    """The file or folder of a source; None: it is the Hub's."""
    dataset = hub_dataset(config)
    return path_of_source(name, config) if dataset is None else find_local(dataset[0])


def _holds_rows(place: Path) -> bool:
    return suffix(place) in ROW_SUFFIXES if place.is_file() else not holds_text_files(place)


def _by_split(path: str) -> tuple[int, str]:
    split = split_of(Path(path).name)
    return ORDER.index(split) if split in ORDER else 0, path


def _read(path: Path) -> bytes:
    if path.suffix.lower() in PACKED or suffix(path) in PACKED:
        raise ValueError(f"{path} is packed: unpack it first (a plain file can be read, and its .gz)")
    if path.suffix.lower() != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path, "rb") as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise ValueError(explain([path]) or f"cannot read {path}: {err}") from None


def _rows(name: str, config: SourceConfig, place: Path | None) -> Iterator[ByteChunk]:
    dataset_id, revision = hub_dataset(config) or (name, None)
    request = HubRequest(dataset_id, None, None, path=place, revision=revision)
    try:
        tables = open_dataset(request)
    except DataUnavailable as err:
        raise DataUnavailable(f"{err}. To train: --source {name}=PATH{_script_hint(config, err)}") from err
    other = [split for split in tables if split not in ORDER]
    if other:
        raise ValueError(
            f"{request} has a split {other[0]!r}: train, validation and test are put together in this order, where it "
            "has no place; name one file"
        )
    several = len(tables) > 1
    for split in sorted(tables, key=ORDER.index):
        for number, text in enumerate(_texts(tables[split], config.field, name)):
            yield ByteChunk(f"{split} row {number}" if several else f"row {number}", text.encode("utf-8"))


def _texts(table: Any, field: str, name: str) -> Iterator[str]:
    """The text of every row, by one field for all; "" for a null. Raises ValueError where there is no such text."""
    if not len(table):
        return
    columns = table.column_names
    try:
        key = field or ("text" if "text" in columns else text_key(table[0]))
    except ValueError as err:
        raise ValueError(f"{name}: {err}") from None
    if key not in columns:
        raise ValueError(f"{name}: the rows have no field {key!r}; they have {', '.join(columns)}")
    for start in range(0, len(table), TABLE_ROWS):
        part: Sequence[Any] = table[start : start + TABLE_ROWS][key]
        for number, text in enumerate(part, start):
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"{name}: {key!r} of row {number} is no text but a {type(text).__name__}: bytes are cut from texts"
                )
            yield text or ""


def _script_hint(config: SourceConfig, err: Exception) -> str:
    """What helps with a dataset that is a script, which `datasets` no longer runs."""
    if "scripts are no longer supported" not in str(err) or "@" in config.path:
        return ""
    return f", or {config.path}@refs/convert/parquet, where the Hub keeps the rows of such datasets"
