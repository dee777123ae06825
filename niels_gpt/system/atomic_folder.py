"""Folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.system import files

_counter = itertools.count()
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.\d+\.(?P<kind>new|old)")


def check_atomic_folder(path: Path, option: str) -> None:
    """Raise ValueError if no folder can appear at `path` by a rename. Call it before long work that writes there.

    `option` is the command-line option that holds the path; the error names it.
    """
    files.check_output_path(path, option, folder=True)
    target = path.resolve()
    if target.is_mount():
        raise ValueError(
            f"{path} is a mount point; the final rename would cross file systems. "
            f"Use a sub-folder for {option}, such as {path / 'model'}"
        )
    if Path.cwd().is_relative_to(target):
        raise ValueError(
            f"{option} {path} is the current folder, or contains it, and a new folder would replace it: "
            f"use a sub-folder, such as {path / 'model'}"
        )


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder that appears at `path` when the block succeeds, and not at all when it fails.

    It is built beside `path` under a hidden name, flushed to disk and renamed. A folder at `path` is replaced as a
    whole; a symbolic link is followed. A kill between the two renames leaves both under hidden names; the next call for
    this path restores the old one. Raises OSError that names the path; the previous folder, if any, is then intact.
    """
    path = Path(path).resolve()
    new = _hidden(path, "new")
    created = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _recover(path)
        new.mkdir()
        yield new
        _flush(new)
        _replace(path, new)
    except OSError as err:
        if err.errno is None:
            raise
        had_files = path.is_dir() and any(path.iterdir())  # an empty one is a claimed name
        raise files.cannot_write(err, path, "; the previous folder is intact" if had_files else "") from err
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if not path.exists():
            files.remove_empty(created)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.{kind}")


def _flush(folder: Path) -> None:
    """Flush all files and folders of a folder to disk."""
    for here, _, names in os.walk(folder):
        for name in names:
            with (Path(here) / name).open("rb") as file:
                os.fsync(file.fileno())
        files.fsync_folder(Path(here))


def _replace(path: Path, new: Path) -> None:
    old = _hidden(path, "old")
    replaced = path.exists()
    if replaced:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if replaced:
            old.rename(path)
        raise
    files.fsync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover(path: Path) -> None:
    """Remove what killed processes left beside `path`; restore a folder that one of them had moved away."""
    for entry in path.parent.iterdir():
        match = _HIDDEN.fullmatch(entry.name)
        if match is None or match["name"] != path.name or files.is_running(int(match["process"])):
            continue
        if match["kind"] == "old" and not path.exists():
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)
