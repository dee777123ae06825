"""User-defined sources at URLs: texts, or rows with a text or a chat, as in a local folder (`user_files.py`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from niels_gpt.config import NotesConfig, SourceConfig
from niels_gpt.data.note_selection import note_text
from niels_gpt.data.reading.drops import Drops
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.reading.url_rows import (
    Check,
    HashedFile,
    ReadBlocks,
    UrlFile,
    check_sizes,
    first_rows,
    hash_file,
    holds_texts,
    is_local,
    list_url,
    no_check,
    parts_of,
    read_part,
)
from niels_gpt.data.reading.utf8 import decode_utf8
from niels_gpt.data.row_layout import RowLayout, layout_of
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.user_files import FIRST_ROWS, sample_of_row
from niels_gpt.system.executors import Executor, ThreadExecutor

_LOCAL_OPTIONS = ("exclude", "include_hidden", "skip_templates", "respect_front_matter")
"""Options of `data.notes` that select files."""


def url_layout(name: str, config: SourceConfig, *, split: str = "train", errors: str = "strict") -> RowLayout:
    """What a source holds, from its first rows. Raises as `user_layout` does."""
    return _layout(name, config, list_url(config.path, split), errors)


def _layout(name: str, config: SourceConfig, found: list[UrlFile], errors: str, check: Check = no_check) -> RowLayout:
    if not holds_texts(found):
        return layout_of(iter(first_rows(found, FIRST_ROWS, errors, check)), name, config)
    if config.kind == "chat" or config.columns:
        raise ValueError(
            f"data.sources.{name}: {config.path} holds plain text, but chats are rows of .jsonl, .json or .parquet"
        )
    return RowLayout("text", "text")


def iter_url_files(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 42,
    take: int | None = None,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
    notes: NotesConfig | None = None,
    executor: Executor | None = None,
    hashed: Sequence[HashedFile] | None = None,
) -> Iterator[PretrainSample | ChatSample]:
    """Yield the samples of a source at a URL, at most `take`; `executor` reads its parts (None: threads).

    hashed: its files, from `url_hashes`: samples then come from the bytes that were hashed, or ValueError is raised.

    Raises ValueError or OSError for unreadable input, and ValueError for options that need local files.
    """
    check_take(take)
    if shuffle:
        raise ValueError(f"data.sources.{name} is read from {config.path} in order: it cannot be shuffled")
    if errors == "skip":
        raise ValueError(f"--encoding-errors skip needs local files, but data.sources.{name} is at {config.path}")
    for option in _LOCAL_OPTIONS if notes is not None else ():
        if getattr(notes, option):
            raise ValueError(f"data.notes.{option} needs local files, but data.sources.{name} is at {config.path}")
    if take == 0:
        return
    found = list_url(config.path, split) if hashed is None else [each.file for each in hashed]
    by_url = {each.file.url: each for each in hashed or ()}

    def check(file: UrlFile, blocks: ReadBlocks) -> None:
        if hashed is not None:
            by_url[file.url].check(blocks)

    layout = _layout(name, config, found, errors, check)
    read = functools.partial(read_part, errors=errors)
    parts = (executor or ThreadExecutor()).in_pieces(parts_of(found, check), read, lambda part: part.pieces)
    yielded = 0
    with Drops(name, stats) as drops, contextlib.closing(parts):  # type: ignore[type-var]
        for part, piece in parts:
            check(part.file, piece.blocks)
            for row in piece.rows:
                if part.kind == "text":
                    row = {"text": _text(row["data"], part.file.url, errors, notes)}
                sample = sample_of_row(row, {"url": part.file.url}, name, layout, drops)
                if sample is not None:
                    yield sample
                    yielded += 1
                    if yielded == take:
                        return


def url_hashes(url: str, executor: Executor | None = None) -> list[HashedFile]:
    """The files of a source with their hashes, in order.

    Every node of the executor must see the files that this machine has listed. Raises ValueError or OSError.
    """
    executor = executor or ThreadExecutor()
    found = list_url(url)
    if is_local(url):
        executor.on_each_node(check_sizes, found)
    with contextlib.closing(executor.in_pieces(found, hash_file, lambda file: 1)) as hashed:  # type: ignore[type-var]
        return [each for _, each in hashed]


def _text(data: bytes, url: str, errors: str, notes: NotesConfig | None) -> str:
    text = decode_utf8(data, where=url, errors=errors)
    return text if notes is None else note_text(text, notes)
