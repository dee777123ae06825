"""Checksums of the blocks of token files: written by builders, checked when a block is first read.

The table of a split, an array of uint64, holds the xxh3_64 of each block of 64 KB of its token files, in their order;
each file starts a new block, and the last block of a file may be shorter. 64 KB is what the system reads for a random
access anyway.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from niels_gpt.cache.copies import ensure, fetch_again
from niels_gpt.cache.formats import CacheError
from niels_gpt.system import files

BLOCK_BYTES = 1 << 16
CHECKSUM_DTYPE = np.dtype("<u8")


class BlockHasher:
    """Computes the checksums of the blocks of one file from its bytes, given in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes at the end of the file."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part, rest = rest[: BLOCK_BYTES - self._filled], rest[BLOCK_BYTES - self._filled :]
            self._hash.update(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._close()

    def _close(self) -> None:
        self._done.append(self._hash.intdigest())
        self._hash.reset()
        self._filled = 0

    def finish(self) -> list[int]:
        """The checksums of all blocks; the file ends here."""
        if self._filled:
            self._close()
        return self._done


def write_table(path: Path, checksums: Sequence[int]) -> None:
    """Write the table of a split."""
    with files.atomic_write(path) as file:
        np.save(file, np.array(checksums, dtype=CHECKSUM_DTYPE))


class BlockChecks(NamedTuple):
    """What the blocks of a file must hash to. Without `checksums`, the file is one block, checked by its sha256."""

    block_bytes: int
    checksums: np.ndarray | None
    sha256: str = ""

    def matches(self, block: int, data: memoryview) -> bool:
        """Whether these are the bytes of a block."""
        if self.checksums is None:
            return hashlib.sha256(data).hexdigest() == self.sha256
        return xxhash.xxh3_64_intdigest(data) == int(self.checksums[block])


def open_checks(
    listed: Mapping[str, Mapping[str, Any]], folder: Path, table: str, names: Sequence[str]
) -> list[BlockChecks]:
    """The checks of token files: all those that `table` covers, in their order.

    listed: the files of the meta. Caches of older versions have no table; each file is then checked as a whole when it
    is first read. Raises CacheError for a table that is damaged or does not match the files.
    """
    if table not in listed:
        return [BlockChecks(max(listed[name]["bytes"], 1), None, listed[name]["sha256"]) for name in names]
    try:
        checksums = load_array(folder / table, listed[table])
    except OSError as err:
        raise CacheError(f"{folder / table} is missing ({err.strerror}): build the cache again") from err
    ends = np.cumsum([-(-listed[name]["bytes"] // BLOCK_BYTES) for name in names], dtype=np.int64).tolist()
    if checksums.ndim != 1 or checksums.dtype != CHECKSUM_DTYPE or len(checksums) != (ends[-1] if ends else 0):
        raise CacheError(f"{folder / table} does not match the token files: build the cache again")
    begins = [0, *ends][:-1]
    return [BlockChecks(BLOCK_BYTES, checksums[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def load_array(path: Path, listed: Mapping[str, Any] | None) -> np.ndarray:
    """The array of a .npy file, read into memory and checked against its entry of the meta, if there is one.

    Raises CacheError if the file is damaged, FileNotFoundError if it is missing.
    """
    ensure(path, listed)
    data = path.read_bytes()
    if listed is not None and files.sha256_bytes(data) != listed["sha256"] and fetch_again(path, listed):
        data = path.read_bytes()
    if listed is not None and files.sha256_bytes(data) != listed["sha256"]:
        raise CacheError(
            f"{path} is damaged, or the cache was rebuilt since it was opened (its sha256 differs from meta.json): "
            "build the cache again (--force), or start again"
        )
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as err:  # a damaged header raises anything: TokenError, SyntaxError, MemoryError
        raise CacheError(f"{path} is damaged ({_first_line(err)}): build the cache again") from None
    if not isinstance(array, np.ndarray):
        raise CacheError(f"{path} is damaged (it is no array): build the cache again")
    return array


def _first_line(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]
