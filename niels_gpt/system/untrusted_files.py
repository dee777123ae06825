"""Files of a folder that comes from others: a model or a tokenizer."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_untrusted_file(path: Path, most: int | None = None) -> bool:
    """Whether a file is there; most: how many bytes it may have.

    Raises ValueError for what is no regular file (a pipe would block for ever), for a link out of the folder (except to
    the blobs of a cache of the Hugging Face Hub), and for a file that is too large.
    """
    if not os.path.lexists(path):
        return False
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    inside = [folder]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        inside.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(each) for each in inside):
        raise ValueError(f"{path} is a link to a file outside its folder: replace it by a copy of that file")
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file: remove it, or copy the folder again")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes, more than {most:,}: it is not a {path.name}")
    return True


def read_untrusted(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file; None if there is none. Raises as `is_untrusted_file`."""
    return path.read_bytes() if is_untrusted_file(path, most) else None
