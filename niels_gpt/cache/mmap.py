"""Token files as memory-mapped arrays whose blocks are checked when they are first read.

Files are mapped when they are opened, so a cache that is rebuilt (its files are replaced by renames) does not change
what an open dataset reads. Only so many files are mapped at a time; a file that must be mapped again is checked again.

Touched pages count as memory of this process until they are released. `MappedFiles` keeps the pages of a small cache
and releases those of a large one from time to time; the page cache of the system keeps them in either case.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.bus_error import install_handler
from niels_gpt.cache.checksums import BlockChecks
from niels_gpt.cache.copies import RemoteFile, on_removal
from niels_gpt.cache.formats import UINT16, CacheError
from niels_gpt.system.program import command

KEEP_BYTES = 1 << 30
"""The pages of caches up to this size are never released."""
RELEASE_BYTES = 64 << 20
"""The pages of larger caches are released after about this much was touched."""
FAULT_BYTES = 128 << 10
"""Upper bound of what one random read maps: Linux maps 64 KB around it, twice if the row crosses a boundary."""
CHECK_SECONDS = 1.0
"""How often sizes and times of the mapped files are compared with those at their opening."""

MAX_OPEN = 1024
"""Most files mapped at the same time, fewer if the system allows fewer open files: a mapping holds a descriptor."""
_open_files: collections.OrderedDict[int, weakref.ref[MappedTokens]] = collections.OrderedDict()
_open_files_lock = threading.RLock()

FileIdentity = tuple[int, int, int]
"""Device, inode and time of the last change (ns) of a file."""


def open_file_limit() -> int | None:
    """The most files that this process may have open; None if there is no limit."""
    try:
        import resource
    except ImportError:  # not POSIX
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def max_open() -> int:
    """Most files mapped at the same time: at most a quarter of the files that this process may have open."""
    limit = open_file_limit()
    return MAX_OPEN if limit is None else max(min(MAX_OPEN, limit // 4), 1)


class MappedTokens:
    """The tokens of one file. Only blocks that match their checksums are returned, if there are checksums."""

    def __init__(
        self,
        path: Path,
        size: int | None = None,
        checks: BlockChecks | None = None,
        identity: FileIdentity | None = None,
        remote: RemoteFile | None = None,
        dtype: np.dtype = UINT16,
    ) -> None:
        """size: the expected number of bytes. identity: of the file that another process opened.

        The file is mapped at once unless `max_open` files are; one that is a copy of a `remote` file is fetched and
        mapped when it is first read. Raises CacheError if the last token is incomplete, and if the file differs from
        `size` or `identity`.
        """
        self.path, self.dtype = path, dtype
        self._width = dtype.itemsize
        self._remote = remote
        will_open = remote is None and len(_open_files) < max_open()
        if size is None or (identity is None and not will_open and remote is None):
            status = path.stat()
            size = status.st_size if size is None else size
            identity = _identity(status) if identity is None else identity
        if size % self._width:
            raise CacheError(
                f"{path} has {size:,} bytes, not a multiple of the {self._width} bytes of a token: the file is "
                "truncated; build the cache again"
            )
        self.size = size // self._width
        """Number of tokens."""
        self._bytes = size
        self._identity = identity
        """None until the file is opened for the first time."""
        self._checks = checks
        self._due = bytearray() if checks is None else bytearray(b"\1") * -(-size // checks.block_bytes)
        """Per block: 1 if it is still to be checked."""
        self._unchecked = bool(self._due)
        """Whether a block is still to be checked."""
        self._lock = threading.Lock()  # for the two above
        self._map: mmap.mmap | None = None
        self._data: memoryview | None = None if size else memoryview(b"")
        if size and will_open:
            self._open()

    def __reduce__(self) -> tuple[type[MappedTokens], tuple[Any, ...]]:
        """Pickle the path and the identity: the other process maps the file again, and notices another file."""
        return MappedTokens, (self.path, self._bytes, self._checks, self._identity, self._remote, self.dtype)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, read-only. Raises CacheError if the file is damaged, or changed after it was opened."""
        return self.slice(0, self.size)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1, read-only. Raises CacheError as `tokens`."""
        return np.frombuffer(self.read(self._width * start, self._width * stop), dtype=self.dtype)

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes begin .. end - 1, read-only. Joining such slices is faster than copying slices of an array.

        Raises CacheError as `tokens`.
        """
        data = self._data
        if data is None:
            while len(_open_files) >= max_open() and _unmap_oldest():
                pass
            data = self._open()
        if self._unchecked:
            try:
                self._check(data, begin, end)
            except CacheError:
                if self._remote is None:
                    raise
                data = self._fetch_again(self._remote)
                self._check(data, begin, end)
        return data[begin:end]

    def _fetch_again(self, remote: RemoteFile) -> memoryview:
        """Replace the copy of a remote file, which is damaged, and map it. Raises CacheError if that differs too."""
        damaged = self._identity
        remote.fetch_again(lambda copy: _identity(copy)[:2] == (damaged or ())[:2] or copy.st_size != self._bytes)
        self._unmap()
        self._check_again()
        return self._open()

    def _check(self, data: memoryview, begin: int, end: int) -> None:
        """Check the blocks of these bytes that were not checked before."""
        assert self._checks is not None
        width, due = self._checks.block_bytes, self._due
        stop = (end - 1) // width + 1
        if due.find(1, begin // width, stop) < 0:
            return
        with self._lock:
            while (block := due.find(1, begin // width, stop)) >= 0:
                first, last = block * width, min((block + 1) * width, self._bytes)
                if not self._checks.matches(block, data[first:last]):
                    if self._remote is not None:
                        name, remedy = self._remote.url, self._remote.remedy()
                    else:
                        name = str(self.path)
                        verify = command("cache", "verify", _cache_of(self.path))
                        remedy = f"run {verify}, and build the cache again (--force)"
                    raise CacheError(
                        f"{name} is damaged or was rebuilt since it was opened (bytes {first:,} to {last - 1:,} differ "
                        f"from their checksum): {remedy}"
                    )
                due[block] = 0
            self._unchecked = 1 in due

    def _check_again(self) -> None:
        """Check all blocks when they are next read."""
        with self._lock:
            self._due[:] = b"\1" * len(self._due)
            self._unchecked = bool(self._due)

    def _open(self) -> memoryview:
        """Map the file. Raises CacheError if it is not the one that was opened, or if too many files are open."""
        while True:
            if self._remote is not None:
                self._remote.fetch()
            try:
                descriptor = os.open(self.path, os.O_RDONLY)
                try:
                    self._compare(os.fstat(descriptor))
                    mapped = mmap.mmap(descriptor, self._bytes, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
                break
            except OSError as err:
                too_many = err.errno in (errno.EMFILE, errno.ENFILE)
                if too_many and _unmap_oldest():
                    continue
                if self._remote is not None and err.errno == errno.ENOENT:
                    continue  # another process removed the copy to make space
                remedy = f"; the limit is {open_file_limit()} and 2 more are needed: ulimit -n raises it"
                raise CacheError(f"cannot open {self.path}: {err.strerror or err}{remedy * too_many}") from err
        install_handler(_describe_truncated)
        self._map, self._data = mapped, memoryview(mapped)
        data, key = self._data, id(self)
        with _open_files_lock:
            _open_files[key] = weakref.ref(self, lambda _: _open_files.pop(key, None))
        return data

    def _compare(self, status: os.stat_result) -> None:
        """Compare a file with the one that was opened. Raises CacheError if its content may differ.

        A file with checksums and the same size may have been replaced: its blocks are checked again.
        """
        if status.st_size != self._bytes:
            raise self._changed(status.st_size)
        if self._identity is None:
            self._identity = _identity(status)
        elif _identity(status) != self._identity:
            if self._checks is None and self._remote is None:
                raise CacheError(f"{self.path} was replaced or changed after it was opened: start again")
            self._identity = _identity(status)
            self._check_again()

    def _changed(self, size: int) -> CacheError:
        what = "was truncated" if size < self._bytes else "was replaced or changed"
        return CacheError(
            f"{self.path} {what} after it was opened (it had {self._bytes:,} bytes, now {size:,}): build the cache "
            "again, or start again"
        )

    def check_unchanged(self) -> None:
        """Raise CacheError if the mapped file has another size now; check its blocks again if it was written to.

        A file that was replaced is not looked at: this one is still the old file.
        """
        if self._map is None or self._identity is None:
            return
        try:
            status = os.stat(self.path)  # noqa: PTH116 (many files a second: no Path objects)
        except OSError:
            if self._remote is not None:  # the copy was removed to make space, which its mapping still occupies
                self._unmap()
            return
        now = _identity(status)
        if now[:2] != self._identity[:2]:
            return
        if status.st_size != self._bytes and self._remote is not None:
            self._unmap()  # fetched again when it is next read
            self._check_again()
            return
        if status.st_size != self._bytes:
            raise self._changed(status.st_size)
        if now != self._identity:
            self._identity = now
            self._check_again()

    def is_truncated(self) -> bool:
        """Whether the mapped file is shorter than it was."""
        return self._map is not None and self._map.size() < self._bytes

    def _unmap(self) -> None:
        """Unmap the file; slices in use stay valid until they are deleted."""
        if self._bytes:
            self._map = self._data = None

    def release(self) -> None:
        """Release the touched pages; later reads come from the page cache again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)


def _identity(status: os.stat_result) -> FileIdentity:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _cache_of(path: Path) -> Path:
    """The cache folder of a token file."""
    return path.parent if (path.parent / "meta.json").exists() else path.parent.parent


def _unmap_oldest() -> bool:
    """Unmap the file that was mapped first; whether there was one."""
    with _open_files_lock:
        if not _open_files:
            return False
        oldest = _open_files.popitem(last=False)[1]()
    if oldest is not None:
        oldest._unmap()
    return True


def unmap_removed() -> None:
    """Unmap the copies of remote files that were removed: their space is free only then."""
    for reference in list(_open_files.values()):
        file = reference()
        if file is not None and file._remote is not None:
            file.check_unchanged()


on_removal.append(unmap_removed)


def _describe_truncated() -> str | None:
    """A line that names a mapped file that was truncated, if there is one."""
    for reference in list(_open_files.values()):
        file = reference()
        if file is not None and file.is_truncated():
            return f"{file.path} was truncated while it was read: build the cache again, and resume"
    return None


class MappedFiles:
    """Several mapped files: bounds their touched pages, and notices changes of the files."""

    def __init__(self, files: list[MappedTokens]) -> None:
        self.files = files
        self._bounded = sum(file.size * file.dtype.itemsize for file in files) > KEEP_BYTES
        self._touched = 0
        self._next_check = time.monotonic() + CHECK_SECONDS

    def touched(self, rows: int, row_bytes: int) -> None:
        """Record that rows were read; release all pages when there may be too many. Raises CacheError.

        From time to time, checks that no file has changed.
        """
        if self._bounded:
            self._touched += rows * (FAULT_BYTES + row_bytes)
            if self._touched > RELEASE_BYTES:
                self._touched = 0
                for file in self.files:
                    file.release()
        if (began := time.monotonic()) >= self._next_check:
            for file in self.files:
                file.check_unchanged()
            ended = time.monotonic()
            self._next_check = ended + max(CHECK_SECONDS, 100 * (ended - began))  # at most 1 % on a slow file system
