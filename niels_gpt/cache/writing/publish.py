"""A finished cache moves in: the old one goes aside, the new one takes its place, name by name.

Until all names are moved, `moving.json` in the hidden folder says so, and both can go back: at once after an error, by
the next build after a kill. Nothing is lost in between, neither the finished build nor the cache it replaces.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from niels_gpt.system import files

MOVING = "moving.json"
OLD = "old"


def move_in(folder: Path, out_dir: Path, names: Sequence[str]) -> None:
    """Move these files and folders from the hidden folder to their place, meta.json (the last) at the end.

    What stood there goes to the hidden folder, also where this build made none of the name. After an error all is
    where it was before.
    """
    made = [name for name in names if (folder / name).exists()]
    files.write_json(folder / MOVING, {"names": list(names), "made": made})
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (folder / OLD).mkdir()
        for name in reversed(names):  # meta.json first: without it, old files are not taken for a finished cache
            if (out_dir / name).exists():
                (out_dir / name).rename(folder / OLD / name)
        for name in made:
            (folder / name).rename(out_dir / name)
        files.fsync_folder(out_dir)
    except BaseException:
        with contextlib.suppress(OSError):  # the next build tries again
            move_back(folder, out_dir)
        raise
    (folder / MOVING).unlink()


def move_back(folder: Path, out_dir: Path) -> None:
    """Undo a `move_in` that did not come to its end; nothing happens where there was none."""
    try:
        moving = json.loads((folder / MOVING).read_text(encoding="utf-8"))
        made, names = list(moving["made"]), list(moving["names"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in reversed(made):
        if not (folder / name).exists() and (out_dir / name).exists():
            (out_dir / name).rename(folder / name)
    for name in names:
        if (folder / OLD / name).exists() and not (out_dir / name).exists():
            (folder / OLD / name).rename(out_dir / name)
    files.fsync_folder(out_dir)
    (folder / MOVING).unlink()
