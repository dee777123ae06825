"""User-defined sources: a folder of text files, or rows with a text or a chat."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.config import SourceConfig
from niels_gpt.data.chat_formats import InvalidChat
from niels_gpt.data.reading import json_rows
from niels_gpt.data.reading.diagnose import explain
from niels_gpt.data.reading.drops import Drops, is_text, text_problem
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.reading.local import ROW_SUFFIXES, choose_split, find_files, list_files, suffix
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.roam import decode_utf8
from niels_gpt.data.row_layout import RowLayout, layout_of
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.system import files

TEXT_SUFFIXES = (".md", ".txt", ".txt.gz")
ARCHIVES = (".zip", ".xz", ".bz2", ".zst", ".7z", ".rar", ".tar", ".tgz")

FIRST_ROWS = 100
"""Rows that `user_layout` reads at most to tell texts from chats."""


def kind_of(name: str, config: SourceConfig, *, split: str = "train") -> str:
    """Return `text` or `chat`. Raises as `user_layout` does."""
    return config.kind if config.kind != "auto" else user_layout(name, config, split=split).kind


def user_layout(name: str, config: SourceConfig, *, split: str = "train") -> RowLayout:
    """Return what a source holds, from its first rows.

    Raises UnknownColumns for rows that are neither texts nor of a known chat format, and as `iter_user_files` does.
    """
    path = path_of_source(name, config)
    if not holds_text_files(path):
        rows = itertools.islice(_rows(name, path, split), FIRST_ROWS)
        return layout_of((row for _, row in rows), name, config)
    if config.kind == "chat" or config.columns:
        raise ValueError(
            f"data.sources.{name}: {path} holds plain text, but chats are rows of .jsonl, .json or .parquet; dialogues "
            "in a text file are the primer (data.primer)"
        )
    return RowLayout("text", "text")


def iter_user_files(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 42,
    take: int | None = None,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample | ChatSample]:
    """Yield the samples of a user-defined source, at most `take`.

    Blank texts and invalid chats are dropped and counted in `stats`. Raises ValueError or OSError for unreadable
    input.
    """
    check_take(take)
    if take == 0:
        return
    layout, path, yielded = user_layout(name, config, split=split), path_of_source(name, config), 0
    order = Shuffle(seed) if shuffle else None
    if holds_text_files(path):
        if split != "train":
            raise ValueError(f"{path} has no split {split!r}; it has train")
        rows: Iterator[tuple[dict[str, Any], dict[str, Any]]] = _files(path, errors, order)
    else:
        rows = ((row, {"row": number}) for number, row in _rows(name, path, split, errors, order))
    with Drops(name, stats) as drops:
        for row, meta in rows:
            sample = _sample(row, meta, name, layout, drops)
            if sample is not None:
                yield sample
                yielded += 1
                if yielded == take:
                    return


def user_file_paths(name: str, config: SourceConfig) -> list[str]:
    """Return the sorted files of a source."""
    path = path_of_source(name, config)
    if path.is_file():
        return [str(path)]
    return list_files(path, TEXT_SUFFIXES if holds_text_files(path) else ROW_SUFFIXES, visible_only=True)


def _sample(
    row: Mapping[str, Any], meta: dict[str, Any], name: str, layout: RowLayout, drops: Drops
) -> PretrainSample | ChatSample | None:
    if layout.kind == "chat":
        chat = layout.format_of(row)
        if chat is None:
            drops.add("without messages")
            return None
        try:
            return ChatSample(chat.messages(row), name, {**_printable(chat.meta(row)), **meta})
        except InvalidChat as err:
            drops.add(str(err))
            return None
    text = row.get(layout.column)
    problem = text_problem(text)
    if problem:
        drops.add(problem)
        return None
    others = {key: value for key, value in row.items() if key != layout.column}
    return PretrainSample(str(text), name, {**_printable(others), **meta})


def _printable(meta: dict[str, Any]) -> dict[str, Any]:
    """Return metadata with lone surrogates, which JSON can hold and no file or terminal accepts, as question marks."""
    for key, value in meta.items():
        if isinstance(value, str | list | dict) and not (isinstance(value, str) and is_text(value)):
            text = json.dumps(value, ensure_ascii=False, default=str)
            meta[key] = value if is_text(text) else json.loads(text.encode("utf-8", "replace"))
    return meta


def _rows(
    name: str, path: Path, split: str, errors: str = "strict", order: Shuffle | None = None
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield (row number, row) of a file or folder of rows."""
    paths = choose_split(find_files(path), split, path)
    if suffix(Path(paths[0])) not in json_rows.SUFFIXES:
        request = HubRequest(name, None, split, streaming=order is None, path=path)
        yield from HubReader(request, shuffle=order)
        return
    paths = json_rows.without_export_extras(paths) if path.is_dir() else paths

    def read() -> Iterator[tuple[int, dict[str, Any]]]:
        return json_rows.iter_json_rows(paths, errors=errors)

    yield from json_rows.shuffled_rows(read, order.seed) if order else read()


def _files(path: Path, errors: str, order: Shuffle | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    root = path if path.is_dir() else path.parent
    paths = list_files(path, TEXT_SUFFIXES, visible_only=True) if path.is_dir() else [str(path)]
    for file in shuffled(paths, order.seed) if order else paths:
        text = decode_utf8(read_file(Path(file)), where=file, errors=errors)
        yield {"text": text}, {"path": Path(file).relative_to(root).as_posix()}


def read_file(path: Path) -> bytes:
    """Return the bytes of a file; a .gz is decompressed. Raises ValueError for an archive and for damaged gzip data."""
    if path.suffix.lower() in ARCHIVES or suffix(path) in ARCHIVES:
        raise ValueError(f"{path} is an archive: unpack it first (plain files and .gz can be read)")
    if path.suffix.lower() != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path, "rb") as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise ValueError(explain([path]) or f"cannot read {path}: {err}") from None


def holds_text_files(path: Path) -> bool:
    """Whether the path holds text files, not rows. Raises ValueError if it holds neither."""
    if path.is_file():
        return path.name.lower().endswith(TEXT_SUFFIXES)
    if list_files(path, ROW_SUFFIXES, visible_only=True):
        return False
    if not list_files(path, TEXT_SUFFIXES, visible_only=True):
        known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
        raise ValueError(f"{path} has no file of a known format; known formats are {known}")
    return True


def path_of_source(name: str, config: SourceConfig) -> Path:
    """Return the absolute path of a source. Raises FileNotFoundError if it does not exist."""
    path = files.expand_home(config.path).absolute()
    if not path.exists():
        raise FileNotFoundError(
            f"data.sources.{name}.path is {path}, but there is no such file or folder; set it to an existing one (to "
            f"train: --source {name}=PATH)"
        )
    return path
