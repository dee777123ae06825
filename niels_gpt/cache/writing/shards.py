"""Write the shards of a split and the offsets of its documents."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.checksums import BlockHasher, write_table
from niels_gpt.cache.formats import CHECKSUMS, DOCUMENTS, OFFSET_DTYPE, UINT16, shard_name
from niels_gpt.system import files

MARGIN_BYTES = 16 << 20
"""Disk space that a build leaves free."""


class SavedSplit(NamedTuple):
    """What an interrupted build wrote of a split."""

    shards: list[dict[str, Any]]
    starts: bytes
    checksums: list[int]


def load_split(folder: Path, state: Mapping[str, Any]) -> SavedSplit:
    """What an interrupted build wrote; `state` is the `ShardWriter.state()` that it saved.

    Raises ValueError, KeyError or OSError if a file differs from the state.
    """
    with starts_path(folder).open("rb") as file:
        starts = file.read(state["documents"] * OFFSET_DTYPE.itemsize)
    if files.sha256_bytes(starts) != state["starts_sha256"]:
        raise ValueError(f"{starts_path(folder)} is damaged")
    checksums = []
    for shard in state["shards"]:
        sha256, blocks = hashlib.sha256(), BlockHasher()
        with (folder / shard["name"]).open("rb") as file:
            while data := file.read(1 << 20):
                sha256.update(data)
                blocks.update(data)
            if sha256.hexdigest() != shard["sha256"] or file.tell() != shard["bytes"]:
                raise ValueError(f"{folder / shard['name']} is damaged")
        checksums += blocks.finish()
    return SavedSplit(list(state["shards"]), starts, checksums)


class ShardWriter:
    """Writes the shards, document offsets and checksums of one split."""

    def __init__(
        self, folder: Path, budget: int, shard_bytes: int, saved: SavedSplit | None, dtype: np.dtype = UINT16
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, folder.name
        self._budget = budget
        self._dtype = dtype
        self._shard_tokens = shard_bytes // dtype.itemsize
        self.shards: list[dict[str, Any]] = saved.shards if saved else []
        self.tokens = sum(shard["tokens"] for shard in self.shards)
        self._starts_path = starts_path(folder)
        stored = saved.starts if saved else b""
        self.starts: list[int] = np.frombuffer(stored, dtype=OFFSET_DTYPE).tolist()
        self._starts_hash = hashlib.sha256(stored)
        self._checksums = saved.checksums if saved else []
        with self._starts_path.open("r+b" if saved else "wb") as file:
            file.truncate(len(stored))
        self._stored_starts = len(self.starts)
        self._file: Any = None
        self._hash, self._blocks = hashlib.sha256(), BlockHasher()
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
            self._hash, self._blocks = hashlib.sha256(), BlockHasher()
        data = np.ascontiguousarray(tokens, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        self._blocks.update(data)
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
                "bytes": self._in_shard * self._dtype.itemsize,
                "tokens": self._in_shard,
                "sha256": self._hash.hexdigest(),
            }
        )
        self._checksums += self._blocks.finish()
        self._in_shard = 0
        starts = np.array(self.starts[self._stored_starts :], dtype=OFFSET_DTYPE).tobytes()
        self._starts_hash.update(starts)
        with self._starts_path.open("ab") as file:
            file.write(starts)
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
        """The finished shards, and the number and hash of the stored offsets, as saved in state.json."""
        sha256 = self._starts_hash.hexdigest()
        return {"shards": self.shards, "documents": self._stored_starts, "starts_sha256": sha256}

    def write_tables(self) -> None:
        """Write documents.npy and checksums.npy beside the shards."""
        with files.atomic_write(self.folder / DOCUMENTS) as file:
            np.save(file, np.array(self.starts, dtype=OFFSET_DTYPE))
        write_table(self.folder / CHECKSUMS, self._checksums)


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
