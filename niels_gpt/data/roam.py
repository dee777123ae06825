"""A folder of markdown notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from niels_gpt.config import NotesConfig
from niels_gpt.data.note_selection import EMPTY, note_text, select_notes
from niels_gpt.data.reading.drops import Drops
from niels_gpt.data.reading.local import list_files
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.reading.utf8 import NOT_UTF8, decode_utf8, read_text, utf8_problem
from niels_gpt.data.split import split_items
from niels_gpt.data.types import PretrainSample
from niels_gpt.system import files


def list_roam_paths(root_dir: str) -> list[str]:
    """Return the absolute paths of all regular files ending in `.md` below root_dir, sorted as strings.

    Raises FileNotFoundError if the folder does not exist, NotADirectoryError if it is a file.
    """
    root = files.expand_home(root_dir).absolute()
    if not root.exists():
        raise FileNotFoundError(f"no folder of notes at {root}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; give a folder of .md files")
    return list_files(root, (".md",))


def load_texts(paths: Sequence[str], *, errors: str = "strict") -> list[str]:
    """Return the utf-8 texts of the files in the same order, unchanged (with line ends and BOM).

    Raises ValueError with the file and the byte offset if a file is not utf-8 (errors="replace" inserts U+FFFD
    instead), and OSError if a file cannot be read.
    """
    return [read_text(path, errors=errors) for path in paths]


def split_roam_paths(paths: list[str], *, val_frac: float = 0.1, seed: int) -> tuple[list[str], list[str]]:
    """Return (train_paths, val_paths), both in input order."""
    return split_items(paths, val_frac=val_frac, seed=seed)


def iter_roam(
    root_dir: str | Path = ".roam-data",
    *,
    take: int | None = None,
    errors: str = "strict",
    stats: dict[str, int] | None = None,
    notes: NotesConfig | None = None,
) -> Iterator[PretrainSample]:
    """Yield the notes of a folder, sorted by path, at most `take`; meta has the `path` relative to the folder.

    notes: which files are read, and how; None: all. Blank notes are dropped and counted in `stats`. Raises as
    `list_roam_paths` and `load_texts` do; errors="skip" drops notes that are not utf-8.
    """
    check_take(take)
    root = files.expand_home(root_dir).absolute()
    yielded = 0
    with Drops("roam", stats, unit="note") as drops:
        if notes is None:
            paths = list_roam_paths(str(root))
        else:
            selected = select_notes(root, notes, errors=errors)
            paths = selected.paths
            for kind in (EMPTY, NOT_UTF8):
                drops.add(kind, sum(entry.kind == kind for entry in selected.skipped))
        for path in paths:
            if yielded == take:
                return
            data = Path(path).read_bytes()
            if errors == "skip" and utf8_problem(data):
                drops.add(NOT_UTF8)
                continue
            text = decode_utf8(data, where=path, errors=errors)
            text = text if notes is None else note_text(text, notes)
            if not text.strip():
                drops.add("empty")
                continue
            yield PretrainSample(text, "roam", {"path": Path(path).relative_to(root).as_posix()})
            yielded += 1
