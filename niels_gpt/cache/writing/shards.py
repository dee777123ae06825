"""Write the shards of a split and the offsets of its documents."""

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
    """Writes the shards and document offsets of one split; `saved` is the `state()` of an interrupted build."""

    def __init__(self, folder: Path, budget: int, shard_bytes: int, saved: Mapping[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, folder.name
        self._budget = budget
        self._shard_tokens = shard_bytes // TOKEN_DTYPE.itemsize
        self.shards: list[dict[str, Any]] = list(saved["shards"]) if saved else []
        self.tokens = sum(shard["tokens"] for shard in self.shards)
        self._starts_path = starts_path(folder)
        self.starts: list[int] = []
        if saved:
            self.starts = np.fromfile(self._starts_path, dtype=OFFSET_DTYPE, count=saved["documents"]).tolist()
        with self._starts_path.open("r+b" if saved else "wb") as file:
            file.truncate(len(self.starts) * OFFSET_DTYPE.itemsize)
        self._stored_starts = len(self.starts)
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._in_shard = 0

    @property
    def tokens_left(self) -> int:
        """Tokens until the budget is reached."""
        return self._budget - self.tokens

    @property
    def shard_tokens_left(self) -> int:
        """Tokens until the shard is full."""
        return self._shard_tokens - self._in_shard

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Append tokens to the open shard; `starts` are the offsets of documents that begin in them."""
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
        """Finish the open shard, if any: sync it, record its hash, and store the offsets of its documents."""
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
        with self._starts_path.open("ab") as file:
            file.write(np.array(self.starts[self._stored_starts :], dtype=OFFSET_DTYPE).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._stored_starts = len(self.starts)

    def abandon(self) -> None:
        """Close the open shard without recording it."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # buffered tokens cannot be written to a full disk
                self._file.close()
            self._file = None

    def state(self) -> dict[str, Any]:
        """The finished shards and the number of stored offsets, as saved in state.json."""
        return {"shards": self.shards, "documents": self._stored_starts}

    def write_documents(self) -> None:
        """Write documents.npy beside the shards."""
        with files.atomic_write(self.folder / DOCUMENTS) as file:
            np.save(file, np.array(self.starts, dtype=OFFSET_DTYPE))


def starts_path(folder: Path) -> Path:
    """Path of a split's document offsets during a build: outside its folder, which is published as it is."""
    return folder.with_name(f"{folder.name}.starts")


def write_error(err: OSError, cache: Path) -> OSError:
    """The same error with the path of the cache and the remedy."""
    number = err.errno or errno.EIO
    reason = os.strerror(number)
    if number in files.NO_SPACE:
        reason += f" ({MARGIN_BYTES >> 20} MiB stay free)" if number == errno.ENOSPC else ""
        remedy = "free some space and run it again: it resumes from the last complete shard"
    elif number in files.NO_PERMISSION:
        remedy = "choose a writable folder"
    else:
        remedy = "no incomplete file has a final name"
    return OSError(number, f"cannot write the cache {cache}: {reason}; {remedy}")
