"""Conversations with a loss on the assistant's tokens only.

The target spans of every example are found once, when the cache is opened: from the token after the assistant sentinel
up to and including the next EOT. A batch copies tokens and looks up spans. The meta of a cache of a tokenizer of others
has other marks: `reply_start`, a sequence of ids, for the sentinel, and `reply_ends` for EOT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from niels_gpt.cache.checksums import load_array, open_checks
from niels_gpt.cache.copies import check_fits, origin_of, remote_file
from niels_gpt.cache.formats import CHECKSUMS
from niels_gpt.cache.meta import (
    CacheError,
    check_file,
    check_total,
    dtype_of,
    fingerprint,
    listed_files,
    open_meta,
    open_unchanged,
)
from niels_gpt.cache.mmap import MappedFiles, MappedTokens
from niels_gpt.cache.remote import local_file
from niels_gpt.chat.format import follows
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command

IGNORE = -100
_SCAN_TOKENS = 1 << 22  # tokens per chunk of the search for spans


def open_sft_tokens(path: Path, meta: dict[str, Any] | None) -> MappedTokens:
    """The tokens of a split of an SFT cache, checked against its meta when they are read. Raises CacheError."""
    listed, dtype = listed_files(meta or {}, path.parent), dtype_of(meta, path.parent)
    if path.name not in listed:
        return MappedTokens(path, dtype=dtype)
    table = f"{path.name.partition('_')[0]}_{CHECKSUMS}"
    checks = open_checks(listed, path.parent, table, [path.name])[0]
    entry = listed[path.name]
    url = origin_of(path.parent)
    if url is not None:
        check_fits(url, {path.name: entry["bytes"]})
    tokens = MappedTokens(path, entry["bytes"], checks, remote=remote_file(path, entry), dtype=dtype)
    total = f"{path.name.partition('_')[0]}_tokens"
    if meta is not None and total in meta:
        check_total(meta, path.parent, total, tokens.size)
    return tokens


class SFTExampleDataset:
    """The examples of a split, one per row, truncated or padded to T + 1 tokens."""

    def __init__(
        self,
        tokens_path: str | Path,
        idx_path: str | Path,
        *,
        T: int,
        device: str | torch.device,
        eot_id: int,
        asst_id: int | None = None,
        tokenizer_sha256: str | None = None,
        verify: bool = False,
    ) -> None:
        """`asst_id` defaults to the id in the meta.json beside the tokens.

        Raises CacheError (a ValueError) for files that are missing, truncated or do not match each other, for another
        tokenizer, and if no example has a target within its first T + 1 tokens.
        """
        if T < 1:
            raise ValueError(f"T must be at least 1, got {T}")
        self.tokens_path, self.idx_path = local_file(tokens_path), local_file(idx_path)
        self.T, self.device, self.eot_id = T, device, eot_id
        open_unchanged(self.tokens_path.parent, lambda: self._open(asst_id, tokenizer_sha256, verify))
        self.dtype = self._tokens.dtype
        """Of the tokens: uint16 or uint32."""
        if not 0 <= eot_id <= np.iinfo(self.dtype).max:
            raise ValueError(f"eot_id must be in 0..{np.iinfo(self.dtype).max}, got {eot_id}")
        self._files = MappedFiles([self._tokens])
        self._padding = np.full(T + 1, eot_id, dtype=self.dtype).tobytes()
        self.num_examples = len(self.bounds) - 1
        self._spans, self._first_span = self._find_spans()
        self.usable = np.flatnonzero(np.diff(self._first_span) > 0)
        """The examples that have a target within their first T + 1 tokens."""
        self.num_excluded = self.num_examples - len(self.usable)
        """Number of examples without one; they are never drawn."""
        if not len(self.usable):
            raise CacheError(
                f"{self.tokens_path}: none of {self.num_examples} examples has an assistant token among its first "
                f"T + 1 = {T + 1} tokens, so there is no target; use a larger T"
            )

    def _open(self, asst_id: int | None, tokenizer_sha256: str | None, verify: bool) -> None:
        """Read the meta and the offsets, and map the tokens."""
        folder, eot_id = self.tokens_path.parent, self.eot_id
        self.meta = open_meta(folder, tokenizer_sha256=tokenizer_sha256)
        if self.meta is not None:
            for path in (self.tokens_path, self.idx_path):
                check_file(self.meta, path.parent, path.name, verify=verify)
            splits = {path.name.partition("_")[0] for path in (self.tokens_path, self.idx_path)}
            if "files" in self.meta and len(splits) > 1:
                raise CacheError(f"{self.idx_path} and {self.tokens_path.name} belong to different splits")
            special = self.meta.get("special_token_ids", {})
            if not isinstance(special, dict):
                raise CacheError(f"{folder / 'meta.json'} is damaged (field special_token_ids): build the cache again")
            if special.get("eot", eot_id) != eot_id:
                raise CacheError(
                    f"{folder} has EOT id {special['eot']}, expected {eot_id}: it was built with another tokenizer"
                )
            if asst_id is not None and special.get("asst", asst_id) != asst_id:
                raise CacheError(f"{folder} has assistant id {special['asst']}, expected {asst_id}")
            asst_id = special.get("asst") if asst_id is None else asst_id
        self.reply_start, self.reply_ends = self._reply_marks(folder, asst_id)
        """The ids after which a reply begins, and those that end it."""
        self.asst_id = self.reply_start[-1]
        if not self.tokens_path.is_file():
            raise CacheError(f"no {self.tokens_path}: build it with {command('cache', 'build', 'SOURCE')}")
        keep_private((self.tokens_path, self.idx_path))
        self._tokens = open_sft_tokens(self.tokens_path, self.meta)
        self.bounds = self._read_bounds()
        """Offset of the first token of each example, and the end of the last."""

    def _reply_marks(self, folder: Path, asst_id: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(the ids after which a reply begins, the ids that end it). Raises CacheError."""
        marks = [(self.meta or {}).get(name) for name in ("reply_start", "reply_ends")]
        if asst_id is not None or not any(marks):
            if asst_id is None:
                raise CacheError(f"{folder} has no meta.json with the assistant id: pass asst_id")
            return (asst_id,), (self.eot_id,)
        for name, ids in zip(("reply_start", "reply_ends"), marks, strict=True):
            if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
                raise CacheError(f"{folder / 'meta.json'} is damaged (field {name}): build the cache again")
        start, ends = marks
        return tuple(start or ()), tuple(ends or ())

    def fingerprint(self) -> str:
        """A sha256 that identifies the tokens; see `meta.fingerprint`."""
        return fingerprint(self.meta or {}, self.tokens_path.parent, self.tokens_path.name.partition("_")[0])

    def _read_bounds(self) -> np.ndarray:
        listed = listed_files(self.meta or {}, self.idx_path.parent).get(self.idx_path.name)
        try:
            starts = load_array(self.idx_path, listed)
        except FileNotFoundError:
            raise CacheError(f"no {self.idx_path}: build it with {command('cache', 'build', 'SOURCE')}") from None
        except OSError as err:
            raise CacheError(f"{self.idx_path} is damaged ({err}): build the cache again") from err
        if starts.ndim != 1 or starts.dtype != np.int64:
            raise CacheError(f"{self.idx_path} must be a 1-D array of int64 offsets: build the cache again")
        bounds = np.append(starts, self._tokens.size)
        if len(starts) == 0 and self._tokens.size:
            raise CacheError(f"{self.idx_path} is empty, but {self.tokens_path} has tokens: build the cache again")
        if len(starts) and (starts[0] != 0 or (np.diff(bounds) <= 0).any()):
            at = 0 if starts[0] != 0 else int(np.flatnonzero(np.diff(bounds) <= 0)[0])
            raise CacheError(
                f"{self.idx_path} does not match {self.tokens_path.name} (offset {at} is {bounds[at]}, the next is "
                f"{bounds[at + 1]}, of {self._tokens.size} tokens): build the cache again"
            )
        return bounds

    def _find_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(spans (n, 2), first): example i has the spans first[i] .. first[i + 1] - 1.

        A span is [begin, end) of target tokens, relative to the example's first token and limited to T + 1.
        """
        found: list[np.ndarray] = []
        counts = np.zeros(self.num_examples, dtype=np.int64)
        i = 0
        while i < self.num_examples:  # complete examples, as many as fit in a chunk
            j = max(int(np.searchsorted(self.bounds, self.bounds[i] + _SCAN_TOKENS, side="right")) - 1, i + 1)
            j = min(j, self.num_examples)
            spans, of = self._scan(i, j)
            found.append(spans)
            counts[i:j] = np.bincount(of, minlength=j - i)
            self._tokens.release()
            i = j
        spans = np.concatenate(found) if found else np.empty((0, 2), dtype=np.int64)
        return spans, np.concatenate(([0], counts.cumsum()))

    def _scan(self, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
        """The spans of examples i .. j - 1, and the example of each (relative to i)."""
        begin, end = int(self.bounds[i]), int(self.bounds[j])
        if j == i + 1:
            end = min(end, begin + self.T + 1)  # an example longer than a chunk: its rest is never used
        tokens = self._tokens.slice(begin, end)
        starts, ends = follows(tokens, self.reply_start), tokens == self.reply_ends[0]
        for other in self.reply_ends[1:]:
            ends |= tokens == other
        for offset in range(len(self.reply_start) - 1):  # a sequence across the border of two examples
            at = self.bounds[i:j] - begin + offset
            starts[at[at < len(starts)]] = False
        marks = np.flatnonzero(starts | ends)
        of = np.searchsorted(self.bounds[i : j + 1], marks + begin, side="right") - 1
        # A span opens at an assistant mark, unless a span of the same example is open ...
        opens = starts[marks]
        if len(marks):
            same = np.concatenate(([False], of[1:] == of[:-1]))
            opens &= ~(np.concatenate(([False], opens[:-1])) & same)
        first = np.flatnonzero(opens)
        # ... and closes at the next EOT of the example, or at the end of the example.
        eots = np.flatnonzero(ends[marks])
        after = np.searchsorted(eots, first)
        example_end = np.minimum(self.bounds[i + 1 : j + 1], end)[of[first]] - begin
        closes = example_end.copy()
        has = after < len(eots)
        closes[has] = np.minimum(marks[eots[after[has]]] + 1, example_end[has])
        origin = self.bounds[i:j][of[first]] - begin
        spans = np.stack((marks[first] + 1 - origin, closes - origin), axis=1)
        spans = np.minimum(spans, self.T + 1)
        kept = spans[:, 0] < spans[:, 1]
        return spans[kept], of[first][kept]

    def get_batch(
        self, *, B: int, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, y, y_masked), each (B, T) int64 on the device; y_masked is -100 outside the assistant's tokens.

        Examples longer than T + 1 tokens are truncated, shorter ones padded with EOT; padding is never a target. The
        same generator state gives the same batch.
        """
        x, y, masked = self.gather(self.plan(B, generator))
        return x.to(self.device), y.to(self.device), masked.to(self.device)

    def plan(self, B: int, generator: torch.Generator | None) -> list[int]:
        """Indices of B examples, drawn uniformly from those that have a target."""
        if B < 1:
            raise ValueError(f"B must be at least 1, got {B}")
        drawn: list[int] = self.usable[torch.randint(len(self.usable), (B,), generator=generator).numpy()].tolist()
        return drawn

    def file(self, number: int) -> Path:
        """The file that holds an example."""
        return self.tokens_path

    def example(self, number: int) -> np.ndarray:
        """All tokens of an example."""
        return self._tokens.slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def target_counts(self) -> dict[str, float]:
        """Numbers of examples and tokens, and of the supervised ones among the first T + 1 tokens of each example."""
        lengths = np.diff(self.bounds)
        seen = int(np.minimum(lengths, self.T + 1).sum())
        supervised = int((self._spans[:, 1] - self._spans[:, 0]).sum())
        return {
            "examples": self.num_examples,
            "without_targets": self.num_excluded,
            "cut": int((lengths > self.T + 1).sum()),
            "tokens": int(lengths.sum()),
            "seen": seen,
            "supervised": supervised,
            "share": supervised / seen,
        }

    def mask(self, number: int) -> np.ndarray:
        """Boolean mask of the targets among the first T + 1 tokens of an example."""
        mask = np.zeros(min(len(self.example(number)), self.T + 1), dtype=bool)
        for begin, end in self._spans[self._first_span[number] : self._first_span[number + 1]]:
            mask[begin:end] = True
        return mask

    def gather(self, examples: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, y, y_masked) of examples, each (len(examples), T) int64 on the CPU."""
        itemsize = self.dtype.itemsize
        width = itemsize * (self.T + 1)
        index = np.asarray(examples, dtype=np.int64)
        starts = (itemsize * self.bounds[index]).tolist()
        ends = (itemsize * self.bounds[index + 1]).tolist()
        read, padding = self._tokens.read, memoryview(self._padding)
        slices: list[memoryview] = []
        for start, end in zip(starts, ends, strict=True):
            row = read(start, min(end, start + width))
            slices += (row, padding[len(row) :])
        rows = np.frombuffer(b"".join(slices), dtype=self.dtype).reshape(len(examples), self.T + 1)
        self._files.touched(len(examples), width)
        x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        masked = np.full_like(y, IGNORE)
        flat, targets = masked.reshape(-1), y.reshape(-1)
        for begin, end in self._targets(index):  # a few slices per row: faster than a running sum over all tokens
            flat[begin:end] = targets[begin:end]
        return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(masked)

    def _targets(self, index: np.ndarray) -> Iterator[tuple[int, int]]:
        """[begin, end) of the targets in the flattened y of these examples."""
        first = self._first_span[index]
        counts = self._first_span[index + 1] - first
        spans = self._spans[np.arange(counts.sum()) + np.repeat(first - counts.cumsum() + counts, counts)]
        shift = np.repeat(np.arange(len(index)) * self.T - 1, counts)  # y starts at the second token
        return zip((spans[:, 0] + shift).tolist(), (spans[:, 1] + shift).tolist(), strict=True)
