"""Files that are written whole or not at all, hashes, and locks.

A file that matters goes through `atomic_write`: temporary name, fsync, rename, fsync of the folder. A kill
at any instant leaves the old file or the new one, and never half of one under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_counter = itertools.count()
_TEMPORARY = re.compile(r"\..+\.\d+\.\d+\.tmp")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_REMEDIES = {
    **dict.fromkeys(NO_SPACE, "free some space"),
    **dict.fromkeys(NO_PERMISSION, "change the rights, or choose another place"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where a folder should be; choose another place"),
    errno.EISDIR: "a folder is where a file should be; remove it, or choose another place",
    errno.ENOENT: "check the path",
}


def describe_os_error(err: OSError) -> str:
    """What an error says in one line. One of the system gets what to do about it; ours say that themselves."""
    if err.errno is None or not err.strerror or err.filename is None:
        return err.strerror or str(err)
    remedy = _REMEDIES.get(err.errno)
    return f"cannot open {os.fsdecode(err.filename)}: {err.strerror}" + (f": {remedy}" if remedy else "")


def expand_home(path: str | Path) -> Path:
    """A path whose ~ is the home folder; a name that only begins with one, or with that of nobody here, stays."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _cannot_write(err: OSError, path: str | Path, more: str = "") -> OSError:
    number = err.errno or errno.EIO
    remedy = f": {_REMEDIES[number]}" if number in _REMEDIES else ""
    return OSError(number, f"cannot write {path}: {os.strerror(number)}{more}{remedy}")


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` when the block ends, and not at all if it fails.

    Raises OSError that names the path and says that what was there before is intact.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        if err.errno is None:
            raise
        raise _cannot_write(err, path, "; the previous file is intact" if path.is_file() else "") from err
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_output_path(path: str | Path, option: str, *, folder: bool = False) -> None:
    """Raise ValueError where no file, or no folder, can be made at `path`: before work whose result is to go there.

    `option`: what the user named the path with.
    """
    path = Path(path)
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if there == path.absolute():
        if there.is_dir() and not folder:
            raise ValueError(f"{path} is a folder, and {option} takes a file: name one in it")
        if not there.is_dir() and folder:
            raise ValueError(f"{path} is a file, and {option} takes a folder: choose another {option}")
    elif not there.is_dir():
        raise ValueError(f"{there} is a file, so nothing can be written to {path}: choose another {option}")
    above = there if there.is_dir() else there.parent
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"you may not write to {above}, and so not to {path}: choose another {option}")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a whole file, atomically."""
    with atomic_write(path) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a whole utf-8 file, atomically; line ends stay as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, atomically, with sorted keys: the same value gives the same bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    if len(text) > 1 << 20:  # for machines then; a million document starts need no line each
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not utf-8: keep it as an escape
        data = json.dumps(value, indent=2, sort_keys=True).encode("ascii")
    write_bytes(path, data + b"\n")


def link_or_copy(existing: Path, path: Path) -> None:
    """Let `path` be the same file as `existing`, atomically: a hard link, or a copy where none can be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.tmp")
    try:
        os.link(existing, temporary)
    except OSError:
        with existing.open("rb") as source, atomic_write(path) as target:
            shutil.copyfileobj(source, target)
        return
    temporary.replace(path)
    temporary.unlink(missing_ok=True)  # where both were the same file already, rename leaves it
    fsync_folder(path.parent)


def remove_temporaries(folder: Path, *, ours: bool = False) -> None:
    """Delete the temporary files that a killed writer left in a folder; call it under its lock.

    Those that bear a name of `atomic_write`; in a folder that is `ours` alone all hidden ones, folders too.
    """
    for temporary in folder.glob(".*.tmp"):
        if not ours and (not _TEMPORARY.fullmatch(temporary.name) or temporary.is_dir()):
            continue
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def sha256_bytes(data: bytes) -> str:
    """The hex sha256 of a byte string."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """The hex sha256 of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: str | Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of a file for the block; the system frees it even after a SIGKILL.

    With wait=False, raises BlockingIOError when another process holds it. Raises OSError that names the file where it
    cannot be made.
    """
    import fcntl

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("ab")
    except OSError as err:
        raise _cannot_write(err, err.filename or path) from err
    with opened as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for reading and writing, what a killed writer left removed; one that is read-only needs no lock."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / "build.lock"))
            remove_temporaries(folder)
        except OSError as err:
            if err.errno not in NO_PERMISSION or not folder.is_dir():
                raise
        yield


def fsync_folder(folder: Path) -> None:
    """Make a rename durable. Some file systems cannot, and then it is as durable as they make it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
