"""The token stream of a split: its concatenated shards, and the offsets of its documents."""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.checksums import load_array, open_checks
from niels_gpt.cache.copies import check_fits, origin_of, remote_file
from niels_gpt.cache.formats import CHECKSUMS, DOCUMENTS, list_shards
from niels_gpt.cache.meta import (
    CacheError,
    check_listed,
    check_total,
    dtype_of,
    fingerprint,
    listed_files,
    open_meta,
    open_unchanged,
    past_vocabulary,
)
from niels_gpt.cache.mmap import MappedFiles, MappedTokens
from niels_gpt.cache.remote import local_folder
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.system.urls import is_url, split_name


class TokenStream:
    """A folder of shards, opened without reading it."""

    def __init__(self, shards_dir: str | Path, *, tokenizer_sha256: str | None = None, verify: bool = False) -> None:
        """verify: read and hash all files. Without a meta.json in the parent folder, shards are used as they are.

        Raises CacheError (a ValueError) for shards that are missing, truncated, or of another dtype or tokenizer.
        """
        if isinstance(shards_dir, str) and is_url(shards_dir):
            cache, split = split_name(shards_dir)
            shards_dir = local_folder(cache) / split
        folder = Path(shards_dir)
        self.folder = folder.resolve() if folder.name in ("", "..") else folder  # "." has no name and no parent
        if not self.folder.is_dir():
            raise CacheError(
                f"no folder of shards at {self.folder}: build it with {command('cache', 'build', 'SOURCE')}"
            )
        self._tokenizer_sha256, self._verify = tokenizer_sha256, verify
        open_unchanged(self.folder.parent, self._open)
        self._files = MappedFiles(self.shards)
        self._bounds = [0, *itertools.accumulate(shard.size for shard in self.shards)]
        """Shard -> offset of its first token in the stream; the last entry is the number of tokens."""
        self.num_tokens = self._bounds[-1]
        if self.meta is not None and f"{self.folder.name}_tokens" in self.meta:
            check_total(self.meta, self.folder.parent, f"{self.folder.name}_tokens", self.num_tokens)
        self._starts: np.ndarray | None = None

    def _open(self) -> None:
        """Read the meta and map the shards."""
        cache, split = self.folder.parent, self.folder.name
        self.meta = open_meta(cache, tokenizer_sha256=self._tokenizer_sha256)
        self.dtype = dtype_of(self.meta, cache)
        """Of the tokens: uint16 or uint32."""
        paths = list_shards(self.folder)
        keep_private((self.folder, *paths))
        if self.meta is None or "files" not in self.meta:
            self.shards = [MappedTokens(path, dtype=self.dtype) for path in paths]
            return
        files = listed_files(self.meta, cache)
        url = origin_of(cache)
        if url is not None:
            self._open_remote(url, files)
            return
        present = {path.name for path in paths}
        for name in files:
            if name.startswith(f"{split}/shard_") and name.removeprefix(f"{split}/") not in present:
                raise CacheError(f"{cache / name} is missing: build the cache again")
        names = [f"{split}/{path.name}" for path in paths]
        sizes = [check_listed(cache / name, files.get(name), verify=self._verify) for name in names]
        if self._verify and f"{split}/{DOCUMENTS}" in files:
            check_listed(self.folder / DOCUMENTS, files[f"{split}/{DOCUMENTS}"], verify=True)
        checks = open_checks(files, cache, f"{split}/{CHECKSUMS}", names)
        self.shards = [MappedTokens(*each, dtype=self.dtype) for each in zip(paths, sizes, checks, strict=True)]

    def _open_remote(self, url: str, files: dict[str, dict[str, Any]]) -> None:
        """Open the local copy of a remote cache: shards are fetched when they are first read, and then mapped."""
        cache, split = self.folder.parent, self.folder.name
        shards = sorted((name for name in files if name.startswith(f"{split}/shard_")), key=lambda n: (len(n), n))
        check_fits(url, {name: files[name]["bytes"] for name in shards})
        if self._verify:
            for name in (*shards, f"{split}/{DOCUMENTS}"):
                check_listed(cache / name, files.get(name), verify=True)
        checks = open_checks(files, cache, f"{split}/{CHECKSUMS}", shards)
        self.shards = [
            MappedTokens(
                cache / name,
                files[name]["bytes"],
                check,
                remote=remote_file(cache / name, files[name]),
                dtype=self.dtype,
            )
            for name, check in zip(shards, checks, strict=True)
        ]

    def fingerprint(self) -> str:
        """A sha256 that identifies the tokens; see `meta.fingerprint`."""
        return fingerprint(self.meta or {}, self.folder.parent, self.folder.name)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from offset `start` on, across shards. Raises ValueError past the end."""
        if start < 0 or start + len(out) > self.num_tokens:
            raise ValueError(
                f"{self.folder} has {self.num_tokens:,} tokens: offset {start:,} + {len(out):,} tokens is past its end"
            )
        i = bisect.bisect_right(self._bounds, start) - 1
        done = 0
        while done < len(out):
            at = start + done - self._bounds[i]
            tokens = self.shards[i].slice(at, min(at + len(out) - done, self.shards[i].size))
            out[done : done + len(tokens)] = tokens
            done += len(tokens)
            i += 1
        self._files.touched(1, self.dtype.itemsize * len(out))

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document. Raises CacheError without documents.npy, IndexError past its documents."""
        starts = self.documents
        if not 0 <= number < len(starts):
            raise IndexError(f"{self.folder} has {len(starts)} documents, numbered from 0; there is no {number}")
        start = int(starts[number])
        end = int(starts[number + 1]) if number + 1 < len(starts) else self.num_tokens
        tokens = np.empty(end - start, dtype=self.dtype)
        self.read(start, tokens)
        return tokens

    def check_document(self, number: int, ids: np.ndarray, vocab_size: int) -> None:
        """Raise CacheError if tokens of a document are past the vocabulary."""
        unsigned = ids.view(np.uint32) if ids.dtype == np.int32 else ids  # an id past 2**31 is negative in an int32
        if len(ids) and (highest := int(unsigned.max())) >= vocab_size:
            raise past_vocabulary(highest, vocab_size, f"document {number} of {self.folder}", self.folder.parent)

    def document_lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64. Raises CacheError without documents.npy."""
        return np.diff(self.documents, append=self.num_tokens)

    @property
    def documents(self) -> np.ndarray:
        """Offset of the first token of each document."""
        if self._starts is None:
            path = self.folder / DOCUMENTS
            listed = listed_files(self.meta or {}, self.folder.parent).get(f"{self.folder.name}/{DOCUMENTS}")
            try:
                starts = load_array(path, listed)
            except OSError as err:
                raise CacheError(f"{path} is missing or damaged: build the cache again") from err
            if starts.ndim != 1 or starts.dtype.kind != "i" or (np.diff(starts) <= 0).any():
                raise CacheError(f"{path} is damaged (the offsets do not increase): build the cache again")
            if len(starts) and not 0 <= starts[0] <= starts[-1] < self.num_tokens:
                raise CacheError(f"{path} is damaged (offsets past {self.num_tokens:,} tokens): build the cache again")
            self._starts = starts
        return self._starts
