"""Local copies of the files of caches at URLs: fetched when they are first read, and bounded in size.

Each file is compared with the sha256 in meta.json on arrival. When the copies exceed `size_limit`, those that were not
used for the longest time are removed, and fetched again if needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.cache.formats import CacheError
from niels_gpt.system import files
from niels_gpt.system.console import short_number
from niels_gpt.system.program import command
from niels_gpt.system.urls import join, open_url, url_errors
from niels_gpt.system.user_cache import REMOTE, private_folder

log = logging.getLogger("niels_gpt.cache")

ORIGIN = "origin.json"
"""File in a local copy: the URL that its cache is at."""
VARIABLE = "NIELS_GPT_REMOTE_GB"
DEFAULT_GB = 100.0
CHUNK_BYTES = 4 << 20
on_removal: list[Callable[[], None]] = []
"""What to call after copies were removed: their space is free only when nothing has them open."""


def size_limit() -> int:
    """Most bytes of local copies of remote caches. Raises ValueError for an invalid NIELS_GPT_REMOTE_GB."""
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text or DEFAULT_GB) * 1e9
        if not 0 < limit < 1e18:
            raise ValueError
    except ValueError:
        raise ValueError(f"{VARIABLE} is {text!r}: set it to a number of GB above 0, or unset it") from None
    return int(limit)


def origin_of(cache: Path) -> str | None:
    """The URL of a cache of which this folder is a local copy; None for any other folder."""
    try:
        return str(json.loads((cache / ORIGIN).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def url_of(folder: Path) -> Path | str:
    """What to call a cache folder: the URL that it is a copy of, or its path."""
    return origin_of(folder) or folder


class RemoteFile(NamedTuple):
    """A file of a remote cache, and its local copy."""

    url: str
    path: Path
    bytes: int
    sha256: str

    def fetch(self) -> None:
        """Copy the file unless there is a copy, and mark it as used now.

        Raises CacheError if its content differs from meta.json, OSError if it cannot be read or stored.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size == self.bytes:
                os.utime(self.path)
                return
        self.fetch_again(lambda copy: copy.st_size != self.bytes)

    def fetch_again(self, is_damaged: Callable[[os.stat_result], bool] = lambda copy: True) -> None:
        """Replace a copy that is missing or damaged. Raises as `fetch` does."""
        with files.lock(self.path.with_name(f".{self.path.name}.lock")):
            with contextlib.suppress(FileNotFoundError):
                if not is_damaged(self.path.stat()):  # another process has replaced it
                    return
                self.path.unlink()
            self._copy()

    def _copy(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.part")
        with _reserved(self.bytes, self.path), temporary.open("wb") as file:
            file.truncate(self.bytes)  # counts as used from now on
        try:
            for attempt in range(2):
                if self._download(temporary) == self.sha256:
                    temporary.replace(self.path)
                    return
                log.debug("%s differs from its sha256 in meta.json (attempt %d of 2)", self.url, attempt + 1)
        finally:
            temporary.unlink(missing_ok=True)
        raise CacheError(
            f"{self.url} differs from its sha256 in meta.json: it is damaged, or was rebuilt since this process opened "
            f"it; start again, and if that does not help, {self.remedy()}"
        )

    def remedy(self) -> str:
        """How to replace a published file that is damaged."""
        match = re.fullmatch(r"(.*)/(?:pretrain|sft)/([^/]+)/(?:(?:train|val|test)/)?[^/]+", self.url)
        if match is None:
            return "build the cache again (--force)"
        return f"build it again: {command('cache', 'build', match[2], '--cache-dir', match[1], '--force')}"

    def _download(self, path: Path) -> str:
        """Write the content to a file; its sha256."""
        digest = hashlib.sha256()
        filesystem, remote = open_url(self.url)
        try:
            with url_errors(self.url, "read"), filesystem.open(remote, "rb") as source, path.open("r+b") as file:
                while data := source.read(CHUNK_BYTES):
                    digest.update(data)
                    file.write(data)
                file.truncate()
        except FileNotFoundError:
            raise CacheError(f"{self.url} is missing, but meta.json lists it: {self.remedy()}") from None
        return digest.hexdigest()


def remote_file(path: Path, listed: Mapping[str, Any] | None) -> RemoteFile | None:
    """The remote file of a path in a local copy; None for a file of a local cache."""
    if listed is None:
        return None
    for cache in (path.parent, path.parent.parent):
        url = origin_of(cache)
        if url is not None:
            return RemoteFile(join(url, path.relative_to(cache).as_posix()), path, listed["bytes"], listed["sha256"])
    return None


def ensure(path: Path, listed: Mapping[str, Any] | None) -> None:
    """Fetch a file that is missing, or has another size, in a local copy of a remote cache; ignore other files."""
    try:
        if listed is None or path.stat().st_size == listed["bytes"]:
            return
    except FileNotFoundError:
        pass
    except OSError:  # whoever reads the file reports it
        return
    remote = remote_file(path, listed)
    if remote is not None:
        remote.fetch()


def fetch_again(path: Path, listed: Mapping[str, Any] | None) -> bool:
    """Replace a local copy that is damaged; False for a file of a local cache. Raises as `RemoteFile.fetch` does."""
    remote = remote_file(path, listed)
    if remote is None:
        return False
    remote.fetch_again()
    return True


def check_fits(url: str, sizes: Mapping[str, int]) -> None:
    """Warn that the token files of a remote split do not fit the local copies together.

    Raises CacheError if one of them (name -> bytes) does not fit alone.
    """
    limit, size = size_limit(), sum(sizes.values())
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if largest:
        _check_fits_alone(f"{url}/{largest}", sizes[largest])
    if size > limit:
        log.warning(
            "%s has %sB, but local copies of remote caches may have %sB: files will be fetched more than once; set "
            "%s to more GB",
            url, short_number(size), short_number(limit), VARIABLE,
        )  # fmt: skip


@contextlib.contextmanager
def _reserved(size: int, path: Path) -> Iterator[None]:
    """Make space for a file among the local copies, by removing those that were not used for the longest time.

    The block creates the file; other processes wait. Raises CacheError for a file that exceeds the limit alone.
    """
    limit = size_limit()
    _check_fits_alone(path.name, size)
    root = private_folder(REMOTE)
    with files.lock(root / ".lock"):
        used, candidates = 0, []
        for file in root.glob("*/**/*"):
            with contextlib.suppress(OSError):
                status = file.stat()
                if file.is_file():
                    used += status.st_size
                    if file.suffix in (".bin", ".npy") or file.name.endswith(".part"):
                        candidates.append((status.st_mtime_ns, status.st_size, file))
        candidates.sort()
        removed = False
        for _, freed, file in candidates:
            if used + size <= limit:
                break
            if file.name.endswith(".part") and not _is_abandoned(file):
                continue
            with contextlib.suppress(OSError):
                file.unlink()
                used, removed = used - freed, True
        if removed:
            for notice in on_removal:
                notice()
        yield


def _check_fits_alone(name: str, size: int) -> None:
    limit = size_limit()
    if size > limit:
        raise CacheError(
            f"{name} has {size:,} bytes, but local copies of remote caches may have {limit:,}: set {VARIABLE} to more "
            f"GB (it is {os.environ.get(VARIABLE) or DEFAULT_GB})"
        )


def _is_abandoned(part: Path) -> bool:
    """Whether no process downloads this file now: a killed one left it."""
    try:
        with files.lock(part.with_suffix(".lock"), wait=False):
            return True
    except BlockingIOError:
        return False
