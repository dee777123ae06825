"""Keep files that are derived from private files private.

Streams, caches, checkpoints and reports contain the text that they were made from. Code that reads such text calls
`keep_private` with the paths it reads. If others cannot read one of these, the umask of the process becomes stricter:
every file and folder that it creates from then on gets mode 0600 or 0700. The umask never becomes looser. What was
created before, by this process or an older version, is made private with `restrict`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_denied_so_far = 0
"""The umask bits that `keep_private` has added."""


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
        global _denied_so_far
        _denied_so_far |= denied
        os.umask(os.umask(0o077) | denied)


def restrict(paths: Iterable[str | Path]) -> None:
    """Remove from existing files and folders the permissions that `keep_private` denies to new ones.

    Files of other users are left as they are.
    """
    for path in paths if _denied_so_far else ():
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116 (as above)
            if mode & _denied_so_far:
                os.chmod(path, mode & ~_denied_so_far)  # noqa: PTH101


def _denied(mode: int) -> int:
    """The umask bits of those (group, others) who cannot read a file, or enter a folder, of this mode."""
    needed = 0o5 if stat.S_ISDIR(mode) else 0o4
    return sum(0o7 << shift for shift in (3, 0) if (mode >> shift) & needed != needed)
