"""User-defined sources: a folder of text files, or rows with a text or with messages."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.chat.transcript import ROLES
from niels_gpt.config import NotesConfig, SourceConfig
from niels_gpt.data.note_selection import SelectedNotes, check_contents, note_text, select_files, utf8_problem
from niels_gpt.data.reading.diagnose import explain
from niels_gpt.data.reading.drops import Drops, is_text, text_problem
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.reading.local import ROW_SUFFIXES, list_files, suffix
from niels_gpt.data.reading.text_rows import check_take, text_key
from niels_gpt.data.roam import decode_utf8
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from niels_gpt.system import files

TEXT_SUFFIXES = (".md", ".txt", ".txt.gz")
ARCHIVES = (".zip", ".xz", ".bz2", ".zst", ".7z", ".rar", ".tar", ".tgz")

FIRST_ROWS = 100
"""Rows that `kind_of` reads at most to tell texts from chats."""


def kind_of(name: str, config: SourceConfig, *, split: str = "train", notes: NotesConfig | None = None) -> str:
    """Return `text` or `chat`; for `auto`, the first row with either decides. Raises as `iter_user_files` does."""
    if config.kind != "auto":
        return config.kind
    path = path_of_source(name, config)
    if not holds_text_files(path, notes):
        for _, row in itertools.islice(HubReader(_request(name, path, split, notes=notes)), FIRST_ROWS):
            if isinstance(row.get(config.field or "messages"), list):
                return "chat"
            if isinstance(row.get(config.field or "text"), str):
                return "text"
    return "text"


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
    notes: NotesConfig | None = None,
) -> Iterator[PretrainSample | ChatSample]:
    """Yield the samples of a user-defined source, at most `take`.

    notes: which files of a folder are read, and how; None: all that are not hidden. errors="skip" drops text files
    that are not utf-8.
    Blank texts and invalid chats are dropped and counted in `stats`. Raises ValueError or OSError for unreadable
    input.
    """
    check_take(take)
    if take == 0:
        return
    kind, path, yielded = kind_of(name, config, split=split, notes=notes), path_of_source(name, config), 0
    order = Shuffle(seed) if shuffle else None
    drops = Drops(name, stats)
    if holds_text_files(path, notes):
        if split != "train":
            raise ValueError(f"{path} has no split {split!r}; it has train")
        rows: Iterator[tuple[dict[str, Any], dict[str, Any]]] = _files(path, errors, order, notes, drops)
    else:
        reader = HubReader(_request(name, path, split, streaming=not shuffle, notes=notes), shuffle=order)
        rows = ((row, {"row": number}) for number, row in reader)
    with drops:
        for row, meta in rows:
            sample = _sample(row, meta, name, kind, config.field, drops)
            if sample is not None:
                yield sample
                yielded += 1
                if yielded == take:
                    return


def user_file_paths(name: str, config: SourceConfig, notes: NotesConfig | None = None) -> list[str]:
    """Return the sorted files of a source; see `iter_user_files` for `notes`."""
    path = path_of_source(name, config)
    if path.is_file():
        return [str(path)]
    return _list(path, TEXT_SUFFIXES if holds_text_files(path, notes) else ROW_SUFFIXES, notes)


def select_user_files(
    name: str, config: SourceConfig, notes: NotesConfig, *, errors: str = "strict"
) -> SelectedNotes | None:
    """Return which files of a source are read, and which are skipped and why; None if the source is one file.

    Text files are checked as notes are (see `select_notes`), files with rows only by their names.
    """
    path = path_of_source(name, config)
    if path.is_file():
        return None
    found = select_by_name(path, notes)
    return check_contents(found, notes, errors=errors, read=read_file) if holds_text_files(path, notes) else found


def select_by_name(path: Path, notes: NotesConfig) -> SelectedNotes:
    """Return which files of a folder of texts or rows are read, without a look into them."""
    suffixes = TEXT_SUFFIXES if holds_text_files(path, notes) else ROW_SUFFIXES
    return select_files(path, notes, is_note=lambda file: file.lower().endswith(suffixes))


def _list(path: Path, suffixes: tuple[str, ...], notes: NotesConfig | None) -> list[str]:
    """Return the files of a folder with these suffixes that `notes` selects by their names."""
    if notes is None:
        return list_files(path, suffixes, visible_only=True)
    return select_files(path, notes, is_note=lambda name: name.lower().endswith(suffixes)).paths


def _sample(
    row: Mapping[str, Any], meta: dict[str, Any], name: str, kind: str, field: str, drops: Drops
) -> PretrainSample | ChatSample | None:
    if kind == "chat":
        used = field or "messages"
        messages = _messages(row.get(used))
        if isinstance(messages, str):
            drops.add(messages)
            return None
        return ChatSample(messages, name, {**_without(row, used), **meta})
    try:
        used = field or text_key(row)
    except ValueError:
        used = ""
    text = row.get(used)
    problem = text_problem(text)
    if problem:
        drops.add(problem)
        return None
    return PretrainSample(str(text), name, {**_without(row, used), **meta})


def _without(row: Mapping[str, Any], used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != used}


def _messages(value: Any) -> list[ChatMessage] | str:
    """Return the messages of a row, or the reason to drop it."""
    if not isinstance(value, list) or not value:
        return "without messages"
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ROLES:
            return "with a role other than " + ", ".join(ROLES)
        if not isinstance(content, str) or not is_text(content) or not content.strip():
            return "with an empty message"
        messages.append(ChatMessage(role, content))
    return messages


def _files(
    path: Path, errors: str, order: Shuffle | None, notes: NotesConfig | None, drops: Drops
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    root = path if path.is_dir() else path.parent
    paths = [str(path)]
    if path.is_dir():
        paths = _list(path, TEXT_SUFFIXES, notes)
    if path.is_dir() and notes is not None:
        selected = check_contents(SelectedNotes(root, paths, []), notes, errors=errors, read=read_file)
        paths = selected.paths
        for entry in selected.skipped:
            drops.add(entry.kind)
    for file in shuffled(paths, order.seed) if order else paths:
        data = read_file(Path(file))
        if errors == "skip" and utf8_problem(data):
            drops.add("not utf-8")
            continue
        text = decode_utf8(data, where=file, errors=errors)
        text = text if notes is None else note_text(text, notes)
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


def holds_text_files(path: Path, notes: NotesConfig | None = None) -> bool:
    """Whether the path holds text files, not rows. Raises ValueError if it holds neither."""
    if path.is_file():
        return path.name.lower().endswith(TEXT_SUFFIXES)
    if _list(path, ROW_SUFFIXES, notes):
        return False
    if not _list(path, TEXT_SUFFIXES, notes):
        known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
        raise ValueError(f"{path} has no file of a known format; known formats are {known}")
    return True


def path_of_source(name: str, config: SourceConfig) -> Path:
    """Return the absolute path of a source. Raises FileNotFoundError if it does not exist."""
    path = files.expand_home(config.path).absolute()
    if not path.exists():
        raise FileNotFoundError(
            f"the source {name} is configured as {path}, but there is no such file or folder: set "
            f"data.sources.{name}.path (--source {name}=PATH)"
        )
    return path


def _request(
    name: str, path: Path, split: str = "train", *, streaming: bool = True, notes: NotesConfig | None = None
) -> HubRequest:
    only = None if notes is None else row_files(path, notes)
    return HubRequest(name, None, split, streaming, path, text_file_is_document=True, only=only)


def row_files(path: Path, notes: NotesConfig) -> frozenset[str] | None:
    """Return the files that may hold rows and that `notes` selects by their names; None if the path is one file."""
    return frozenset(_list(path, (*ROW_SUFFIXES, *TEXT_SUFFIXES), notes)) if path.is_dir() else None
