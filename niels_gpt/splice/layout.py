"""The spans of a document by arithmetic: how many there are, and which is number j. Nothing is enumerated.

A span is `length` tokens from `t` on at place `s` of a frame of S tokens. They are numbered t by t, and s by s within a
t. K is the length asked for, m the shortest that counts, k_t and k_s the strides.
"""

from __future__ import annotations

import numpy as np

from niels_gpt.config.splice import check_options, log


class Layout:
    """Counts and locates the spans of documents of any length; all methods take arrays."""

    def __init__(
        self,
        *,
        S: int,
        content_length: int | None,
        content_stride: int,
        offset_stride: int,
        content_start_mode: str,
        min_copy_len: int,
        adaptive_k: bool,
        mode: str,
        offset_bound: str,
    ) -> None:
        """Raises ValueError for an option outside its limits."""
        checked = check_options(
            {
                "S": S,
                "content_length": content_length,
                "content_stride": content_stride,
                "offset_stride": offset_stride,
                "content_start_mode": content_start_mode,
                "min_copy_len": min_copy_len,
                "mode": mode,
                "offset_bound": offset_bound,
            }
        )
        self.S = S = checked["S"]
        self.K = min(checked["content_length"] or S, S)
        if content_length is not None and content_length > S:
            log.warning("content_length=%d does not fit a frame of S=%d: spans have %d tokens", content_length, S, S)
        self.k_t, self.k_s, self.m = (checked[k] for k in ("content_stride", "offset_stride", "min_copy_len"))
        self.kind = "slide" if mode == "slide" else content_start_mode
        self.adaptive, self.tight = adaptive_k, offset_bound == "tight"
        if self.kind == "slide_within" and self.tight:
            self._number_tails()

    def content(self, lengths: np.ndarray) -> np.ndarray:
        """K of each document: 0 where it is too short for a span."""
        if self.kind == "slide":
            return np.where((lengths >= self.S) & (self.m <= self.S), self.S, 0)
        K = np.minimum(lengths, self.K)
        if self.kind in ("coverage_balanced", "cyclic_roll") and not self.adaptive:
            K = np.where(lengths >= self.K, K, 0)
        return np.where(self.m <= K, K, 0)

    def shortest(self) -> int:
        """The length from which on a document gives examples."""
        if self.kind == "slide":
            return self.S
        return (
            max(self.K, self.m) if self.kind in ("coverage_balanced", "cyclic_roll") and not self.adaptive else self.m
        )

    def starts(self, lengths: np.ndarray) -> np.ndarray:
        """How many different t each document has."""
        K = self.content(lengths)
        last = {
            "anchor_start": np.zeros_like(lengths),
            "slide_within": lengths - self.m,
            "cyclic_roll": lengths - 1,
        }.get(self.kind, lengths - K)
        return np.where(K > 0, last // self.k_t + 1, 0)

    def counts(self, lengths: np.ndarray) -> np.ndarray:
        """How many spans each document has."""
        starts, K = self.starts(lengths), self.content(lengths)
        if self.kind in ("slide", "coverage_balanced"):
            return starts
        if self.kind == "slide_within" and self.tight:
            full = self._full(lengths)
            tails = self._tails(lengths, full)
            return np.where(K > 0, full * self._offsets(self.K) + tails, 0)
        return starts * self._offsets(K)

    def spans(self, lengths: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(t, s, length) of span number `number` of a document of length `lengths`, for each pair."""
        K = self.content(lengths)
        if self.kind == "slide":
            return number * self.k_t, np.zeros_like(number), K
        if self.kind == "coverage_balanced":
            return number * self.k_t, self.S - K, K
        if self.kind == "slide_within" and self.tight:
            return self._slide_within(lengths, number)
        offsets = self._offsets(K)
        start, offset = np.divmod(number, offsets)
        t, s = start * self.k_t, offset * self.k_s
        left = K if self.kind == "cyclic_roll" else np.minimum(self.K, lengths - t)
        return t, s, np.minimum(left, self.S - s)

    def _offsets(self, copied: np.ndarray | int) -> np.ndarray:
        """How many places a span of so many tokens has."""
        room = self.S - copied if self.tight else self.S - self.m + np.zeros_like(copied)
        return np.asarray(room // self.k_s + 1)

    # slide_within, tight: a start with K tokens to come has the same number of places as all such. The others, the
    # tails, have one more token of room each the later they start. Their places are summed up once in a table that is
    # ordered by the remainder r = L - t modulo the stride, so that the tails of one document stand in a row.

    def _number_tails(self) -> None:
        step = min(self.k_t, self.K)
        rest = np.arange(self.m, self.K)  # r of a tail
        order = np.lexsort((-rest, rest % step))
        self._at = np.zeros(self.K + 1, dtype=np.int64)
        self._at[rest[order]] = np.arange(len(rest))
        self._places = self._offsets(rest[order])
        self._sums = np.cumsum(self._places)

    def _full(self, lengths: np.ndarray) -> np.ndarray:
        """How many starts have K tokens to come."""
        return np.where(lengths >= self.K, (lengths - self.K) // self.k_t + 1, 0)

    def _tails(self, lengths: np.ndarray, full: np.ndarray) -> np.ndarray:
        """How many spans the tails of each document have."""
        first = lengths - full * self.k_t
        some = first >= self.m
        begin = self._at[np.where(some, first, 0)]
        end = begin + np.where(some, (first - self.m) // self.k_t, 0)
        if not len(self._sums):
            return np.zeros_like(lengths)
        return np.where(some, self._sums[end] - self._sums[begin] + self._places[begin], 0)

    def _slide_within(self, lengths: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        full, places = self._full(lengths), self._offsets(self.K)
        start, offset = np.divmod(number, places)
        copied = np.full_like(number, self.K)
        tail = np.flatnonzero(number >= full * places)
        if len(tail):
            first = (lengths - full * self.k_t)[tail]
            begin = self._at[first]
            target = (number - full * places)[tail] + self._sums[begin] - self._places[begin]
            at = np.searchsorted(self._sums, target, side="right")
            start[tail] = full[tail] + at - begin
            offset[tail] = target - self._sums[at] + self._places[at]
            copied[tail] = first - (at - begin) * self.k_t
        return start * self.k_t, offset * self.k_s, copied
