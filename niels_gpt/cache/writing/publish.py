"""Publish a finished cache: move the old one aside, then move the new one in, name by name.

Until all names are moved, `moving.json` in the hidden folder records the move, and it can be rolled back: at once after
an error, by the next build after a kill. Neither the finished build nor the cache it replaces is lost.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json

MOVING = "moving.json"
OLD = "old"


def publish_files(folder: Path, out_dir: Path, names: Sequence[str]) -> None:
    """Move these files and folders from the hidden folder to out_dir; meta.json is the last name.

    Existing entries of these names move to the hidden folder, also those that this build does not replace. An error
    restores the previous state.
    """
    built = [name for name in names if (folder / name).exists()]
    write_checked_json(folder / MOVING, {"names": list(names), "made": built})
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (folder / OLD).mkdir()
        for name in reversed(names):  # meta.json first: without it, the old files do not count as a finished cache
            if (out_dir / name).exists():
                (out_dir / name).rename(folder / OLD / name)
        for name in built:
            (folder / name).rename(out_dir / name)
        files.fsync_folder(out_dir)
    except BaseException:
        with contextlib.suppress(OSError):  # the next build rolls back again
            roll_back(folder, out_dir)
        raise
    (folder / MOVING).unlink()


def is_published(folder: Path) -> bool:
    """Whether `publish_files` has moved everything out of a hidden folder that has a moving.json."""
    try:
        return not any((folder / name).exists() for name in read_checked_json(folder / MOVING)["made"])
    except (DamagedJSON, KeyError, TypeError):
        return False


def roll_back(folder: Path, out_dir: Path) -> None:
    """Undo an unfinished `publish_files`; does nothing if there was none."""
    try:
        moving = read_checked_json(folder / MOVING)
        built, names = list(moving["made"]), list(moving["names"])
    except OSError:
        return
    except (DamagedJSON, KeyError, TypeError):
        _restore_old(folder, out_dir)
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in reversed(built):
        if not (folder / name).exists() and (out_dir / name).exists():
            (out_dir / name).rename(folder / name)
    for name in names:
        if (folder / OLD / name).exists() and not (out_dir / name).exists():
            (folder / OLD / name).rename(out_dir / name)
    files.fsync_folder(out_dir)
    (folder / MOVING).unlink()


def _restore_old(folder: Path, out_dir: Path) -> None:
    """Restore the old cache where the record of the move is damaged; the new one is lost, and is built again."""
    for path in sorted((folder / OLD).iterdir(), reverse=True) if (folder / OLD).is_dir() else ():
        new = out_dir / path.name
        if new.is_dir():
            shutil.rmtree(new)
        path.replace(new)
