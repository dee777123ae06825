"""Token files as memory-mapped arrays.

Touched pages count as memory of this process until they are released. `MappedFiles` keeps the pages of a small cache
and releases those of a large one from time to time; the page cache of the system keeps them in either case.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
from pathlib import Path

import numpy as np

from niels_gpt.cache.formats import TOKEN_DTYPE
from niels_gpt.cache.meta import CacheError

KEEP_BYTES = 1 << 30
"""The pages of caches up to this size are never released."""
RELEASE_BYTES = 64 << 20
"""The pages of larger caches are released after about this much was touched."""
FAULT_BYTES = 128 << 10
"""Upper bound of what one random read maps: Linux maps 64 KB around it, twice if the row crosses a boundary."""


MAX_OPEN = 128
"""Number of files mapped at the same time: each mapping holds a file descriptor, and their number is limited."""
_open_files: collections.OrderedDict[int, MappedTokens] = collections.OrderedDict()
_open_files_lock = threading.Lock()


class MappedTokens:
    """The tokens of one file, mapped on first use and unmapped when many other files are used."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Raises CacheError for an odd number of bytes."""
        self.path = path
        size = path.stat().st_size if size is None else size
        if size % TOKEN_DTYPE.itemsize:
            raise CacheError(f"{path} has {size:,} bytes, an odd number: the file is truncated; build the cache again")
        self.size = size // TOKEN_DTYPE.itemsize
        """Number of tokens."""
        self._map: mmap.mmap | None = None
        self._tokens: np.ndarray | None = None
        self._data: memoryview | None = None

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, uint16, read-only. Raises CacheError if the file is shorter than it was."""
        tokens = self._tokens
        if tokens is None:
            if self.size == 0:
                return np.empty(0, dtype=TOKEN_DTYPE)
            with self.path.open("rb") as file:
                try:
                    self._map = mmap.mmap(file.fileno(), self.size * TOKEN_DTYPE.itemsize, access=mmap.ACCESS_READ)
                except ValueError as err:
                    raise CacheError(f"{self.path} was truncated after it was opened") from err
            tokens = self._tokens = np.frombuffer(self._map, dtype=TOKEN_DTYPE)
            with _open_files_lock:
                _open_files[id(self)] = self
                if len(_open_files) > MAX_OPEN:
                    _open_files.popitem(last=False)[1]._unmap()
        return tokens

    def __reduce__(self) -> tuple[type[MappedTokens], tuple[Path, int]]:
        """Pickle the path and size: the other process maps the file again."""
        return MappedTokens, (self.path, self.size * TOKEN_DTYPE.itemsize)

    def _unmap(self) -> None:
        """Unmap the file; slices in use stay valid until they are deleted."""
        self._map = self._tokens = self._data = None

    @property
    def data(self) -> memoryview:
        """All bytes, read-only. Joining slices of it is faster than copying slices of an array."""
        data = self._data
        if data is None:
            data = self._data = self.tokens.data.cast("B") if self.size else memoryview(b"")
        return data

    def release(self) -> None:
        """Release the touched pages; later reads come from the page cache again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)


class MappedFiles:
    """Several mapped files with a bound on their touched pages."""

    def __init__(self, files: list[MappedTokens]) -> None:
        self.files = files
        self._bounded = sum(file.size for file in files) * TOKEN_DTYPE.itemsize > KEEP_BYTES
        self._touched = 0

    def touched(self, rows: int, row_bytes: int) -> None:
        """Record that rows were read; release all pages when there may be too many."""
        if self._bounded:
            self._touched += rows * (FAULT_BYTES + row_bytes)
            if self._touched > RELEASE_BYTES:
                self._touched = 0
                for file in self.files:
                    file.release()
