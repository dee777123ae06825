"""Token files as arrays that stay on disk.

Touched pages count as memory of this process until they are released. `MappedFiles` keeps the pages of a small
cache, and releases those of a large one from time to time; the page cache of the system keeps them either way.
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
"""Caches up to this size stay mapped once touched."""
RELEASE_BYTES = 64 << 20
"""Of larger ones, about this much stays mapped at a time."""
FAULT_BYTES = 128 << 10
"""What one random read may map: Linux maps the 64 KB around it, twice where the row crosses a border."""


MAX_OPEN = 128
"""Files that are mapped at a time: a mapping holds a file descriptor, and a process may have few."""
_open_files: collections.OrderedDict[int, MappedTokens] = collections.OrderedDict()
_opening = threading.Lock()


class MappedTokens:
    """The tokens of one file, mapped when first used, and unmapped when many others are used."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Raises CacheError for a size that is no whole number of tokens."""
        self.path = path
        size = path.stat().st_size if size is None else size
        if size % TOKEN_DTYPE.itemsize:
            raise CacheError(f"{path} has {size:,} bytes, an odd number: it is cut off; build the cache again")
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
                    raise CacheError(f"{self.path} has become shorter since it was opened") from err
            tokens = self._tokens = np.frombuffer(self._map, dtype=TOKEN_DTYPE)
            with _opening:
                _open_files[id(self)] = self
                if len(_open_files) > MAX_OPEN:
                    _open_files.popitem(last=False)[1]._forget()
        return tokens

    def __reduce__(self) -> tuple[type[MappedTokens], tuple[Path, int]]:
        """Another process maps the file itself."""
        return MappedTokens, (self.path, self.size * TOKEN_DTYPE.itemsize)

    def _forget(self) -> None:
        """Unmap; slices that are still in use stay valid until they are gone."""
        self._map = self._tokens = self._data = None

    @property
    def data(self) -> memoryview:
        """All bytes, read-only: slices of it are joined to rows faster than slices of an array are copied."""
        data = self._data
        if data is None:
            data = self._data = self.tokens.data.cast("B") if self.size else memoryview(b"")
        return data

    def release(self) -> None:
        """Let the touched pages go; what is read next comes from the file cache again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)


class MappedFiles:
    """Several mapped files whose touched pages are kept within bounds."""

    def __init__(self, files: list[MappedTokens]) -> None:
        self.files = files
        self._bounded = sum(file.size for file in files) * TOKEN_DTYPE.itemsize > KEEP_BYTES
        self._touched = 0

    def touched(self, rows: int, row_bytes: int) -> None:
        """Note that rows were read; lets pages go when they may be too many."""
        if self._bounded:
            self._touched += rows * (FAULT_BYTES + row_bytes)
            if self._touched > RELEASE_BYTES:
                self._touched = 0
                for file in self.files:
                    file.release()
