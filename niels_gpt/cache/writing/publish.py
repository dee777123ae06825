"""Publish a finished cache: move the old one aside, then move the new one in, name by name.

Until all names are moved, `moving.json` in the hidden folder records the move, and it can be rolled back: at once after
an error, by the next build after a kill. Neither the finished build nor the cache it replaces is lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from niels_gpt.system import files

MOVING = "moving.json"
OLD = "old"


def publish_files(folder: Path, out_dir: Path, names: Sequence[str]) -> None:
    """Move these files and folders from the hidden folder to out_dir; meta.json is the last name.

    Existing entries of these names move to the hidden folder, also those that this build does not replace. An error
    restores the previous state.
    """
    built = [name for name in names if (folder / name).exists()]
    files.write_json(folder / MOVING, {"names": list(names), "made": built})
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


def roll_back(folder: Path, out_dir: Path) -> None:
    """Undo an unfinished `publish_files`; does nothing if there was none."""
    try:
        moving = json.loads((folder / MOVING).read_text(encoding="utf-8"))
        built, names = list(moving["made"]), list(moving["names"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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
