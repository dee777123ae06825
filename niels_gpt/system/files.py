"""Atomic writes of files and folders, hashes, locks, and messages for errors of the file system.

Important files are written with `atomic_write`: temporary name, fsync, rename, fsync of the folder. A kill at any
moment leaves either the old file or the new one under the final name, never a partial file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_counter = itertools.count()
_TEMPORARY = re.compile(r"\..+\.\d+\.\d+\.tmp")
_HIDDEN_FOLDER = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.\d+\.(?P<kind>new|old)")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
LOCK_SECONDS = 0.2
"""Seconds to wait for a lock that `is_locked` of another process may hold for an instant."""
_REMEDIES = {
    **dict.fromkeys(NO_SPACE, "free some space"),
    **dict.fromkeys(NO_PERMISSION, "change the permissions, or choose another path"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file exists where a folder is needed; choose another path"),
    errno.EISDIR: "a folder exists where a file is needed; remove it, or choose another path",
    errno.ENOENT: "check the path",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}


def describe_os_error(err: OSError) -> str:
    """Return an OSError as one line; errors of the system get a remedy, our own messages already have one."""
    if err.errno is None or not err.strerror or err.filename is None:
        return err.strerror or str(err)
    remedy = _REMEDIES.get(err.errno)
    return f"cannot open {os.fsdecode(err.filename)}: {err.strerror}" + (f": {remedy}" if remedy else "")


def expand_home(path: str | Path) -> Path:
    """Replace a leading ~ or ~user by the home folder; return other paths, and unknown users, unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def display_path(path: str | Path) -> str:
    """Return a path as a person would write it: relative if it is inside the current folder, with ~ in the home."""
    if not Path(path).is_absolute():  # also `embedded`, `hub`
        return str(path)
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if base != Path("/") and Path(path) != base and Path(path).is_relative_to(base):
            return f"{prefix}{Path(path).relative_to(base)}"
    return str(path)


def cannot_write(err: OSError, path: str | Path, more: str = "") -> OSError:
    """Return an error of writing with the path, the reason and a remedy."""
    number = err.errno or errno.EIO
    remedy = f": {_REMEDIES[number]}" if number in _REMEDIES else ""
    return OSError(number, f"cannot write {path}: {os.strerror(number)}{more}{remedy}")


@contextlib.contextmanager
def atomic_write(path: str | Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` when the block succeeds, and not at all when it fails.

    A symbolic link is followed: the file that it names is replaced. A device or a pipe is written to directly. A file
    that is replaced passes on its permissions, as far as the umask allows them.

    mode: the permissions of the file, such as 0o600; None: the default ones. Raises OSError that names the path and
    says that the previous file, if any, is intact.
    """
    path = Path(path)
    try:
        target = path.resolve() if path.is_symlink() else path
        with target.open("wb") if _is_device(target) else _open_temporary(target, mode) as file:
            yield file
    except OSError as err:
        if err.errno is None:
            raise
        raise cannot_write(err, path, "; the previous file is intact" if path.is_file() else "") from err


def _is_device(path: Path) -> bool:
    """Whether a path is a device, a pipe or a socket. Raises IsADirectoryError for a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return not stat.S_ISREG(mode)


@contextlib.contextmanager
def _open_temporary(path: Path, mode: int | None) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` when the block succeeds. It is locked while it is written."""
    _sweep(path)
    temporary = _temporary(path, "tmp")
    try:
        with temporary.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mode is None and path.exists():
                mode = path.stat().st_mode & os.fstat(file.fileno()).st_mode & 0o777
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path, kind: str) -> Path:
    """A hidden name beside a path that no other call has."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.{kind}")


def _sweep(path: Path) -> None:
    """Delete temporary files for `path` that processes left which no longer exist."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):  # noqa: PTH208 (no Path object per file)
            if name.startswith(f".{path.name}.") and _TEMPORARY.fullmatch(name):
                temporary = path.with_name(name)
                if not is_running(int(name.rsplit(".", 3)[1])) and not is_locked(temporary):
                    temporary.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def check_output_path(path: str | Path, option: str, *, folder: bool = False) -> None:
    """Raise ValueError if no file (or folder) can be created at `path`. Call it before long work that writes there.

    `option` is the command-line option or argument that holds the path; the error names it.
    """
    path = Path(path)
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if existing == path.absolute():
        if existing.is_dir() and not folder:
            raise ValueError(f"{path} is a folder, but {option} needs a file: give a path inside it")
        if not existing.is_dir() and folder:
            raise ValueError(f"{path} is a file, but {option} needs a folder: choose another {option}")
    elif not existing.is_dir():
        raise ValueError(f"{existing} is a file, so {path} cannot be created: choose another {option}")
    is_device = not existing.is_dir() and not existing.is_file()
    writable = existing if existing.is_dir() or is_device else existing.resolve().parent
    if not os.access(writable, os.W_OK if is_device else os.W_OK | os.X_OK):
        raise ValueError(f"no permission to write to {writable}, so {path} cannot be written: choose another {option}")


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders in this order, up to the first that cannot be removed, because something is in it."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def check_atomic_folder(path: Path, option: str) -> None:
    """Raise ValueError if no folder can appear at `path` by a rename. Call it before long work that writes there.

    `option` is the command-line option that holds the path; the error names it.
    """
    check_output_path(path, option, folder=True)
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
    new = _temporary(path, "new")
    created = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _recover_folder(path)
        new.mkdir()
        yield new
        _flush_folder(new)
        _replace_folder(path, new)
    except OSError as err:
        if err.errno is None:
            raise
        had_files = path.is_dir() and any(path.iterdir())  # an empty one is a claimed name
        raise cannot_write(err, path, "; the previous folder is intact" if had_files else "") from err
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if not path.exists():
            remove_empty(created)


def _flush_folder(folder: Path) -> None:
    """Flush all files and folders of a folder to disk."""
    for here, _, names in os.walk(folder):
        for name in names:
            with (Path(here) / name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_folder(Path(here))


def _replace_folder(path: Path, new: Path) -> None:
    old = _temporary(path, "old")
    replaced = path.exists()
    if replaced:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if replaced:
            old.rename(path)
        raise
    fsync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover_folder(path: Path) -> None:
    """Remove what killed processes left beside `path`; restore a folder that one of them had moved away."""
    for entry in path.parent.iterdir():
        match = _HIDDEN_FOLDER.fullmatch(entry.name)
        if match is None or match["name"] != path.name or is_running(int(match["process"])):
            continue
        if match["kind"] == "old" and not path.exists():
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def write_bytes(path: str | Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a file atomically; see `atomic_write` for the mode."""
    with atomic_write(path, mode=mode) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a utf-8 file atomically; line ends are not changed."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any, *, mode: int | None = None) -> None:
    """Write a JSON file atomically, with sorted keys: the same value gives the same bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    if len(text) > 1 << 20:  # without indentation: a million offsets need no line each
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not utf-8: write it as an escape
        data = json.dumps(value, indent=2, sort_keys=True).encode("ascii")
    write_bytes(path, data + b"\n", mode=mode)


def link_or_copy(existing: Path, path: Path) -> None:
    """Make `path` a hard link to `existing`, atomically; a copy if the file system has no hard links."""
    temporary = _temporary(path, "tmp")
    try:
        os.link(existing, temporary)
    except OSError:
        with existing.open("rb") as source, atomic_write(path) as target:
            shutil.copyfileobj(source, target)
        return
    temporary.replace(path)
    temporary.unlink(missing_ok=True)  # rename does nothing if both names are the same file
    fsync_folder(path.parent)


def matching(folder: Path, pattern: str) -> list[Path]:
    """The entries of a folder whose name matches, sorted; none if the folder does not exist.

    Raises OSError for a folder that cannot be read; `Path.glob` would find nothing in it.
    """
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(path for path in entries if fnmatch.fnmatchcase(path.name, pattern))


def remove_temporaries(folder: Path, *, ours: bool = False) -> None:
    """Delete temporary files that a killed writer left in a folder. Call it while holding the lock.

    Deletes only names that `atomic_write` uses. With `ours` (no other program writes to the folder), it deletes every
    `.*.tmp`, folders included.
    """
    for temporary in folder.glob(".*.tmp"):
        if not ours and (not _TEMPORARY.fullmatch(temporary.name) or temporary.is_dir()):
            continue
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def sha256_bytes(data: bytes) -> str:
    """Return the hex sha256 of a byte string."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Return the hex sha256 of a file, read in chunks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: str | Path, *, wait: bool | float = True) -> Iterator[None]:
    """Hold an exclusive lock on a file for the block; the system releases it even after a SIGKILL.

    The lock file remains. With wait=False, or after `wait` seconds, raises BlockingIOError if another process holds the
    lock. Raises OSError that names the path if the lock file cannot be created.
    """
    import filelock

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(path).acquire(timeout=-1 if wait is True else float(wait), poll_interval=0.02)
    except filelock.Timeout:  # a TimeoutError, and so an OSError too
        raise BlockingIOError(errno.EAGAIN, f"another process holds the lock {path}") from None
    except OSError as err:
        raise cannot_write(err, err.filename or path) from err
    with held:
        yield


def is_locked(path: str | Path) -> bool:
    """Whether a process holds the lock on a file. Needs no permission to write; several may ask at a time.

    Asking holds a shared lock for an instant. Raises OSError if the file cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            pass
    return False


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for the block and remove leftover temporary files; a read-only folder needs no lock."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / "build.lock"))
            remove_temporaries(folder)
        except OSError as err:
            if err.errno not in NO_PERMISSION or not folder.is_dir():
                raise
        yield


def fsync_folder(folder: Path) -> None:
    """Flush a rename in the folder to disk; does nothing on file systems that cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
