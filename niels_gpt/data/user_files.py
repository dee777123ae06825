"""User-defined sources: a folder of text files, or rows with a text or a chat."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.config import NotesConfig, SourceConfig
from niels_gpt.data.chat_formats import InvalidChat
from niels_gpt.data.note_selection import UNREADABLE, SelectedNotes, Skipped, check_contents, note_text, select_files
from niels_gpt.data.reading import json_rows
from niels_gpt.data.reading.diagnose import explain
from niels_gpt.data.reading.drops import Drops, is_text, text_problem
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.reading.local import ROW_SUFFIXES, choose_split, find_files, list_files, suffix
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.reading.utf8 import NOT_UTF8, decode_utf8, utf8_problem, utf8_problem_of
from niels_gpt.data.row_layout import RowLayout, layout_of
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.system import files
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.system.urls import is_url

TEXT_SUFFIXES = (".md", ".txt", ".txt.gz")
ARCHIVES = (".zip", ".xz", ".bz2", ".zst", ".7z", ".rar", ".tar", ".tgz")

FIRST_ROWS = 100
"""Rows that `user_layout` reads at most to tell texts from chats."""
BESIDE_EXPORT = "beside the conversations of an export"
"""Why user.json and others of an unpacked chat export are skipped."""


def kind_of(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    errors: str = "strict",
    notes: NotesConfig | None = None,
) -> str:
    """Return `text` or `chat`. Raises as `user_layout` does."""
    if config.kind != "auto":
        return config.kind
    return user_layout(name, config, split=split, errors=errors, notes=notes).kind


def user_layout(
    name: str,
    config: SourceConfig,
    *,
    split: str = "train",
    errors: str = "strict",
    notes: NotesConfig | None = None,
) -> RowLayout:
    """Return what a source holds, from its first rows; see `iter_user_files` for `errors` and `notes`.

    Raises UnknownColumns for rows that are neither texts nor of a known chat format, and as `iter_user_files` does.
    """
    path = path_of_source(name, config)
    if not holds_text_files(path, notes):
        rows = itertools.islice(_rows(name, path, split, errors, notes=notes), FIRST_ROWS)
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
    notes: NotesConfig | None = None,
) -> Iterator[PretrainSample | ChatSample]:
    """Yield the samples of a user-defined source, at most `take`.

    notes: which files of a folder are read, and how; None: all that are not hidden. errors="skip" drops files that
    are not utf-8.
    Blank texts and invalid chats are dropped and counted in `stats`. Raises ValueError or OSError for unreadable
    input.
    """
    check_take(take)
    if take == 0:
        return
    layout = user_layout(name, config, split=split, errors=errors, notes=notes)
    path, yielded = path_of_source(name, config), 0
    order = Shuffle(seed) if shuffle else None
    drops = Drops(name, stats)
    if holds_text_files(path, notes):
        if split != "train":
            raise ValueError(f"{path} has no split {split!r}; it has train")
        rows: Iterator[tuple[dict[str, Any], dict[str, Any]]] = _files(path, errors, order, notes, drops)
    else:
        reader = _rows(name, path, split, errors, order, notes, drops)
        rows = ((row, {"row": number}) for number, row in reader)
    with drops:
        for row, meta in rows:
            sample = sample_of_row(row, meta, name, layout, drops)
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

    Text files are checked as notes are (see `select_notes`). Of files with rows, errors="skip" skips those that are
    not utf-8; otherwise they are checked when they are read.
    """
    path = path_of_source(name, config)
    if path.is_file():
        return None
    found = select_by_name(path, notes)
    if holds_text_files(path, notes):
        return check_contents(found, notes, errors=errors, read=read_file)
    problems = {file: _row_problem(file) for file in found.paths} if errors == "skip" else {}
    return found.without({file: reason for file, reason in problems.items() if reason})


def select_by_name(path: Path, notes: NotesConfig) -> SelectedNotes:
    """Return which files of a folder of texts or rows are read, without a look into them."""
    holds_texts = holds_text_files(path, notes)
    suffixes = TEXT_SUFFIXES if holds_texts else ROW_SUFFIXES
    found = select_files(path, notes, is_note=lambda file: file.lower().endswith(suffixes))
    if holds_texts:
        return found
    kept = set(json_rows.without_export_extras(found.paths))
    return found.without({file: BESIDE_EXPORT for file in found.paths if file not in kept})


def _list(path: Path, suffixes: tuple[str, ...], notes: NotesConfig | None) -> list[str]:
    """Return the files of a folder with these suffixes that `notes` selects by their names."""
    if notes is None:
        return list_files(path, suffixes, visible_only=True)
    return select_files(path, notes, is_note=lambda name: name.lower().endswith(suffixes)).paths


def sample_of_row(
    row: Mapping[str, Any], meta: dict[str, Any], name: str, layout: RowLayout, drops: Drops
) -> PretrainSample | ChatSample | None:
    """The text or chat of a row; None if it is dropped, which `drops` counts."""
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
    name: str,
    path: Path,
    split: str,
    errors: str = "strict",
    order: Shuffle | None = None,
    notes: NotesConfig | None = None,
    drops: Drops | None = None,
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield (row number, row) of a file or folder of rows; `drops` counts the files that errors="skip" leaves out."""
    only = row_files(path, notes)
    paths = choose_split(find_files(path, only=only), split, path)
    if suffix(Path(paths[0])) not in json_rows.SUFFIXES:
        request = HubRequest(name, None, split, streaming=order is None, path=path, only=only)
        yield from HubReader(request, shuffle=order)
        return
    paths = json_rows.without_export_extras(paths) if path.is_dir() else paths
    chosen = _readable(paths, drops) if errors == "skip" else iter(paths)
    if order is None:
        yield from json_rows.iter_json_rows(chosen, errors=errors)
        return
    paths = list(chosen)
    yield from json_rows.shuffled_rows(lambda: json_rows.iter_json_rows(paths, errors=errors), order.seed)


def _readable(paths: list[str], drops: Drops | None) -> Iterator[str]:
    """Yield the files with rows that errors="skip" reads. Raises ValueError if there are none."""
    reason = None
    found = False
    for path in paths:
        reason = _row_problem(path)
        if reason is None:
            found = True
            yield path
        elif drops is not None:
            drops.add(Skipped(path, reason).kind)
    if not found:
        raise ValueError(f"there are no rows to read: {paths[-1]} is skipped ({reason})")


def _row_problem(path: str) -> str | None:
    """Return why errors="skip" leaves out a file with rows; None: it is read. Formats other than JSON are binary."""
    if suffix(Path(path)) not in json_rows.SUFFIXES:
        return None
    try:
        return utf8_problem_of(json_rows.raw_chunks(Path(path)))
    except OSError as err:
        return f"{UNREADABLE}: {err.strerror or err}"


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
            drops.add(NOT_UTF8)
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
    known = ", ".join((*TEXT_SUFFIXES, *ROW_SUFFIXES))
    if path.is_file():
        if not path.name.lower().endswith((*TEXT_SUFFIXES, *ROW_SUFFIXES, *ARCHIVES)):
            raise ValueError(f"{path}: unknown format; known formats are {known}, and .zip of a chat export")
        return path.name.lower().endswith(TEXT_SUFFIXES)
    if _list(path, ROW_SUFFIXES, notes):
        return False
    if not _list(path, TEXT_SUFFIXES, notes):
        raise ValueError(f"{path} has no file of a known format; known formats are {known}")
    return True


def path_of_source(name: str, config: SourceConfig) -> Path:
    """Return the absolute path of a source. Raises FileNotFoundError if it does not exist, ValueError for a URL."""
    if is_url(config.path):
        raise ValueError(
            f"data.sources.{name}.path is {config.path}: a URL can be read into a token cache "
            f"({command('cache', 'build', name)}), and trained on with the tasks pretrain and sft; byte streams need "
            "local files"
        )
    path = files.expand_home(config.path).absolute()
    if not path.exists():
        raise FileNotFoundError(
            f"data.sources.{name}.path is {path}, but there is no such file or folder; set it to an existing one (to "
            f"train: --source {name}=PATH)"
        )
    keep_private([path])
    return path


def row_files(path: Path, notes: NotesConfig | None) -> frozenset[str] | None:
    """Return the files that may hold rows and that `notes` selects by their names; None: any file of the path."""
    if notes is None or not path.is_dir():
        return None
    return frozenset(_list(path, (*ROW_SUFFIXES, *TEXT_SUFFIXES), notes))
