"""Keep files that are derived from private files private.

Streams, caches, checkpoints and reports contain the text that they were made from. Code that reads such text calls
`keep_private` with the paths it reads. If others cannot read one of these, the umask of the process becomes stricter:
every file and folder that it creates from then on gets mode 0600 or 0700. The umask never becomes looser.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def keep_private(paths: Iterable[str | Path]) -> None:
    """Make files that this process creates at least as private as the strictest of these files and folders.

    Paths that do not exist are ignored.
    """
    if os.name != "posix":
        return
    denied = 0
    for path in paths:
        try:
            denied |= _denied(os.stat(path).st_mode)  # noqa: PTH116 (a str of many paths: no Path objects)
        except (OSError, ValueError):
            continue
        if denied == 0o077:
            break
    if denied:
        os.umask(os.umask(0o077) | denied)


def _denied(mode: int) -> int:
    """The umask bits of those (group, others) who cannot read a file, or enter a folder, of this mode."""
    needed = 0o5 if stat.S_ISDIR(mode) else 0o4
    return sum(0o7 << shift for shift in (3, 0) if (mode >> shift) & needed != needed)
