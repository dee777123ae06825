"""Writing the shards of a split, and where its documents begin."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.formats import DOCUMENTS, OFFSET_DTYPE, TOKEN_DTYPE, shard_name
from niels_gpt.system import files

MARGIN_BYTES = 16 << 20
"""Disk space that a build leaves free."""


class ShardWriter:
    """The shards and document starts of one split."""

    def __init__(self, folder: Path, budget: int, shard_bytes: int, saved: Mapping[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, folder.name
        self._budget = budget
        self._shard_tokens = shard_bytes // TOKEN_DTYPE.itemsize
        self.shards: list[dict[str, Any]] = list(saved["shards"]) if saved else []
        self.tokens = sum(shard["tokens"] for shard in self.shards)
        self._raw = starts_path(folder)
        self.starts: list[int] = []
        if saved:
            self.starts = np.fromfile(self._raw, dtype=OFFSET_DTYPE, count=saved["documents"]).tolist()
        with self._raw.open("r+b" if saved else "wb") as file:
            file.truncate(len(self.starts) * OFFSET_DTYPE.itemsize)
        self._stored_starts = len(self.starts)
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._in_shard = 0

    @property
    def room(self) -> int:
        """Tokens until the budget is full."""
        return self._budget - self.tokens

    @property
    def shard_room(self) -> int:
        """Tokens until the shard is full."""
        return self._shard_tokens - self._in_shard

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        if self._file is None:
            self._file = (self.folder / shard_name(len(self.shards))).open("wb")
            self._hash = hashlib.sha256()
        data = np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data
        self._file.write(data)
        self._hash.update(data)
        self._in_shard += len(tokens)
        self.tokens += len(tokens)
        self.starts += starts.tolist()

    def close_shard(self) -> None:
        """Finish the shard, if one is open: on disk, hashed, listed. The starts of its documents are stored with it."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.shards.append(
            {
                "name": shard_name(len(self.shards)),
                "bytes": self._in_shard * TOKEN_DTYPE.itemsize,
                "tokens": self._in_shard,
                "sha256": self._hash.hexdigest(),
            }
        )
        self._in_shard = 0
        with self._raw.open("ab") as file:
            file.write(np.array(self.starts[self._stored_starts :], dtype=OFFSET_DTYPE).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._stored_starts = len(self.starts)

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written yet cannot be written on a full disk
                self._file.close()
            self._file = None

    def state(self) -> dict[str, Any]:
        return {"shards": self.shards, "documents": self._stored_starts}

    def write_documents(self) -> None:
        """documents.npy, beside the shards."""
        with files.atomic_write(self.folder / DOCUMENTS) as file:
            np.save(file, np.array(self.starts, dtype=OFFSET_DTYPE))


def starts_path(folder: Path) -> Path:
    """Where the starts of a split's documents are kept while it grows: beside its folder, which moves in as it is."""
    return folder.with_name(f"{folder.name}.starts")


def cannot_write(err: OSError, place: Path) -> OSError:
    """The same error with the cache's name and what to do."""
    number = err.errno or errno.EIO
    reason = os.strerror(number)
    if number in files.NO_SPACE:
        reason += f" ({MARGIN_BYTES >> 20} MiB stay free)" if number == errno.ENOSPC else ""
        remedy = "free some space and run it again: it goes on from the last complete shard"
    elif number in files.NO_PERMISSION:
        remedy = "choose a folder that can be written"
    else:
        remedy = "nothing incomplete was left under a final name"
    return OSError(number, f"cannot write the cache {place}: {reason}; {remedy}")
