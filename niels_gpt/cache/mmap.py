"""Token files as arrays that stay on disk.

Pages that were touched count as this process's memory until they are let go. `Files` keeps those of a small cache, and
lets those of a large one go from time to time; the system's file cache keeps them in either case.
"""

from __future__ import annotations

import contextlib
import mmap
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


class Mapped:
    """The tokens of one file, mapped when first used."""

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
        if self._tokens is None:
            if self.size == 0:
                self._tokens = np.empty(0, dtype=TOKEN_DTYPE)
            else:
                with self.path.open("rb") as file:
                    try:
                        self._map = mmap.mmap(file.fileno(), self.size * TOKEN_DTYPE.itemsize, access=mmap.ACCESS_READ)
                    except ValueError as err:
                        raise CacheError(f"{self.path} has become shorter since it was opened") from err
                self._tokens = np.frombuffer(self._map, dtype=TOKEN_DTYPE)
        return self._tokens

    @property
    def data(self) -> memoryview:
        """All bytes, read-only: slices of it are joined to rows faster than slices of an array are copied."""
        if self._data is None:
            self._data = self.tokens.data.cast("B") if self.size else memoryview(b"")
        return self._data

    def release(self) -> None:
        """Let the touched pages go; what is read next comes from the file cache again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)


class Files:
    """Several mapped files whose touched pages are kept within bounds."""

    def __init__(self, files: list[Mapped]) -> None:
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
