"""The user's cache folder: byte streams, text indexes, remote caches and compiled kernels; all can be rebuilt.

$XDG_CACHE_HOME/niels-gpt, or ~/.cache/niels-gpt. It holds text of private notes, so only its owner may read it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from niels_gpt.system import files
from niels_gpt.system.checked_json import read_checked_json
from niels_gpt.system.console import remove_folder

STREAMS = "streams"
"""Sub-folder of the byte streams: one folder per choice of sources."""
REMOTE = "remote"
"""Sub-folder of the local copies of token caches at URLs: one folder per URL and content."""
BUILDS = "builds"
"""Sub-folder of the builds of token caches that are copied to URLs: one folder per URL."""
INDEXES = "indexes"
"""Sub-folder of the indexes of training text: one folder per source and content."""


def cache_folder() -> Path:
    """The user's cache folder; it may not exist yet."""
    given = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given).expanduser().absolute() / "niels-gpt"


def create_private(folder: Path) -> None:
    """Create a folder, with its missing parents, that only its owner can read. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(exist_ok=True, mode=0o700)


def why_unsafe(folder: Path) -> str:
    """Why code must not be loaded from a folder, and the remedy; empty if only this user (and root) can replace files.

    Checked are the folder and its parents up to the home folder, links resolved: whoever can write one of them can
    put another folder in its place. A parent with the sticky bit (/tmp) is safe, because it protects what is inside.
    """
    folder, home = folder.resolve(), Path.home().resolve()
    user = os.getuid()
    for path in (folder, *folder.parents):
        status = path.stat()
        if status.st_uid != user and (path == folder or status.st_uid not in _system_users()):
            return f"{path} belongs to another user (id {status.st_uid}): chown it"
        sticky = status.st_mode & stat.S_ISVTX and path != folder
        if status.st_mode & 0o022 and not sticky:
            return f"other users can write {path}: chmod go-w {shlex.quote(str(path))}"
        if path == home:
            break
    return ""


def _system_users() -> set[int]:
    """Root, and the user that stands for all users outside a container."""
    try:
        return {0, int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))}
    except (OSError, ValueError):
        return {0}


def private_folder(*parts: str) -> Path:
    """Create a sub-folder of the cache folder that only its owner can read, and return it. Raises OSError."""
    folder = cache_folder()
    try:
        create_private(folder)
        for part in parts:
            folder = folder / part
            folder.mkdir(exist_ok=True, mode=0o700)
            if folder.stat().st_mode & 0o077:
                folder.chmod(0o700)
    except OSError as err:
        remedy = "set XDG_CACHE_HOME or data.cache_dir to a folder that can be written"
        raise OSError(err.errno, f"cannot create the cache folder {folder}: {err.strerror}; {remedy}") from err
    return folder


def mark_used(folder: Path) -> None:
    """Record that a folder of the cache is used now: its modification time."""
    with contextlib.suppress(OSError):
        os.utime(folder)


class CacheEntry(NamedTuple):
    """Something in the cache folder that can be removed."""

    path: Path
    what: str
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""


def list_entries() -> list[CacheEntry]:
    """What the cache folder holds, the most recently used first. Files of other programs are not listed."""
    folder = cache_folder()
    entries = []
    for part, describe in _PARTS.items():
        for path in (folder / part).glob("*"):
            if path.is_dir() and not path.is_symlink():
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                entries.append(CacheEntry(path, describe(path), size, path.stat().st_mtime))
    for path in folder.glob("*-*.so"):
        entries.append(CacheEntry(path, "compiled kernel", path.stat().st_size, path.stat().st_atime))
    return sorted(entries, key=lambda entry: entry.used, reverse=True)


def remove_entry(entry: CacheEntry) -> bool:
    """Remove an entry; False if another process is using it. Raises ValueError for a path outside the cache folder."""
    folder = cache_folder()
    if entry.path.parent not in (folder, *(folder / part for part in _PARTS)):
        raise ValueError(f"{entry.path} is not in {folder}: nothing outside it is removed")
    if entry.path.is_symlink() or not entry.path.is_dir():
        entry.path.unlink(missing_ok=True)
        return True
    try:
        with files.lock(entry.path / "build.lock", wait=False):
            for path in entry.path.iterdir():
                if path.name != "build.lock" and not (path.is_dir() and not path.is_symlink()):
                    path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    remove_folder(entry.path, consequence="run the command again")
    return True


def _describe_streams(folder: Path) -> str:
    names = sorted({path.name.removesuffix(".meta.json").rpartition("_")[0] for path in folder.glob("*.meta.json")})
    roots = {name: _root_of(folder, name) for name in names}
    listed = ", ".join(f"{name} ({root})" if root else name for name, root in roots.items())
    return f"byte streams: {listed or 'unfinished'}"


def _describe_index(folder: Path) -> str:
    what = "unfinished"
    with contextlib.suppress(OSError, ValueError, KeyError):
        meta = read_checked_json(folder / "meta.json")
        what = f"{meta['source']} ({meta['path']})"
    return f"text index: {what}"


_PARTS: dict[str, Callable[[Path], str]] = {
    STREAMS: _describe_streams,
    REMOTE: lambda _: "copy of remote token caches",
    BUILDS: lambda _: "build of remote token caches",
    INDEXES: _describe_index,
}
"""How an entry of each sub-folder is called."""


def _root_of(folder: Path, source: str) -> str:
    """The folder or file that a source was read from, as far as its metadata says."""
    paths: list[str] = []
    for meta in folder.glob(f"{source}_*.meta.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = read_checked_json(meta)
            listed = content.get("files") or [content]
            paths += [entry["path"] for entry in listed if "path" in entry]
    if not paths:
        return ""
    if all(Path(path).is_relative_to(Path(__file__).parents[1]) for path in paths):
        return "embedded"
    return paths[0] if len(paths) == 1 else os.path.commonpath([os.path.abspath(path) for path in paths])  # noqa: PTH100
