"""The spans of a document by arithmetic: how many there are, and which is span number j. Nothing is enumerated.

A span is `length` tokens from `t` on, at position `s` of a frame of S tokens. Spans are numbered by t, then by s. K is
the requested length, m the minimum length, k_t and k_s are the strides of t and s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from niels_gpt.config.splice import check_options, log
from niels_gpt.splice.weights import distinct_pairs, per_document


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
                "adaptive_k": adaptive_k,
                "mode": mode,
                "offset_bound": offset_bound,
            }
        )
        self.S = S = checked["S"]
        self.K = min(checked["content_length"] or S, S)
        self.k_t, self.k_s, self.m = (checked[k] for k in ("content_stride", "offset_stride", "min_copy_len"))
        self.kind = "slide" if mode == "slide" else content_start_mode
        self.adaptive, self.tight = adaptive_k, offset_bound == "tight"
        if self.kind == "slide_within" and self.tight:
            self._index_tails()

    def content(self, lengths: np.ndarray) -> np.ndarray:
        """Span length K of each document; 0 if it is too short for a span."""
        if self.kind == "slide":
            return np.where((lengths >= self.S) & (self.m <= self.S), self.S, 0)
        K = np.minimum(lengths, self.K)
        if self.kind in ("coverage_balanced", "cyclic_roll") and not self.adaptive:
            K = np.where(lengths >= self.K, K, 0)
        return np.where(self.m <= K, K, 0)

    def shortest(self) -> int:
        """Minimum length of a document that has spans."""
        if self.kind == "slide":
            return self.S
        return (
            max(self.K, self.m) if self.kind in ("coverage_balanced", "cyclic_roll") and not self.adaptive else self.m
        )

    def starts(self, lengths: np.ndarray) -> np.ndarray:
        """Number of different t of each document."""
        K = self.content(lengths)
        last = {
            "anchor_start": np.zeros_like(lengths),
            "slide_within": lengths - self.m,
            "cyclic_roll": lengths - 1,
        }.get(self.kind, lengths - K)
        return np.where(K > 0, last // self.k_t + 1, 0)

    def counts(self, lengths: np.ndarray) -> np.ndarray:
        """Number of spans of each document."""
        starts, K = self.starts(lengths), self.content(lengths)
        if self.kind in ("slide", "coverage_balanced"):
            return starts
        if self.kind == "slide_within" and self.tight:
            full = self._full(lengths)
            tails = self._tails(lengths, full)
            return np.where(K > 0, full * self._offsets(self.K) + tails, 0)
        return starts * self._offsets(K)

    def distinct(self, lengths: np.ndarray) -> np.ndarray:
        """Number of spans of each document that differ in more than their offset s: of distinct (t, length)."""
        if self.tight or self.kind in ("slide", "coverage_balanced"):
            return self.starts(lengths)
        unique, which = np.unique(lengths, return_inverse=True)
        numbers = np.zeros(len(unique), dtype=np.int64)
        for i, (length, starts) in enumerate(zip(unique.tolist(), self.starts(unique).tolist(), strict=True)):
            left = np.full(starts, length) if self.kind == "cyclic_roll" else length - np.arange(starts) * self.k_t
            # Near the right end of the frame every offset truncates the span further, down to min_copy_len.
            truncated = (self.S - self.m) // self.k_s - (self.S - np.minimum(self.K, left)) // self.k_s
            numbers[i] = (1 + truncated).sum()
        return numbers[which.reshape(-1)]

    def spans(self, lengths: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(t, s, length) of span `number` of a document of length `lengths`, for each pair."""
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

    def first_numbers(self, lengths: np.ndarray, start: np.ndarray) -> np.ndarray:
        """The number of the first span of start `start` (0, 1, ...) of a document of length `lengths`, for each."""
        if self.kind in ("slide", "coverage_balanced"):
            return start
        if not (self.kind == "slide_within" and self.tight):
            return start * self._offsets(self.content(lengths))
        full = self._full(lengths)
        numbers = np.minimum(start, full) * self._offsets(self.K)
        tail = np.flatnonzero(start > full)
        if len(tail):
            begin = self._tail_index[(lengths - full * self.k_t)[tail]]
            at = begin + (start - full)[tail]
            numbers[tail] += self._sums[at - 1] - self._sums[begin] + self._offset_counts[begin]
        return numbers

    def _offsets(self, copied: np.ndarray | int) -> np.ndarray:
        """Number of offsets s of a span of `copied` tokens."""
        last = self.S - copied if self.tight else self.S - self.m + np.zeros_like(copied)
        return np.asarray(last // self.k_s + 1)

    # slide_within, tight: all starts with at least K tokens left have the same number of offsets. The other starts, the
    # tails, have shorter spans and so more offsets. The offsets of tails are summed once, in a table ordered by the
    # tokens left r = L - t, modulo the stride, so that the tails of one document are consecutive.

    def _index_tails(self) -> None:
        step = min(self.k_t, self.K)
        rest = np.arange(self.m, self.K)  # r of each tail
        order = np.lexsort((-rest, rest % step))
        self._tail_index = np.zeros(self.K + 1, dtype=np.int64)
        self._tail_index[rest[order]] = np.arange(len(rest))
        self._offset_counts = self._offsets(rest[order])
        self._sums = np.cumsum(self._offset_counts)

    def _full(self, lengths: np.ndarray) -> np.ndarray:
        """Number of starts with at least K tokens left."""
        return np.where(lengths >= self.K, (lengths - self.K) // self.k_t + 1, 0)

    def _tails(self, lengths: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Number of spans of the tails of each document."""
        first = lengths - full * self.k_t
        some = first >= self.m
        begin = self._tail_index[np.where(some, first, 0)]
        end = begin + np.where(some, (first - self.m) // self.k_t, 0)
        if not len(self._sums):
            return np.zeros_like(lengths)
        return np.where(some, self._sums[end] - self._sums[begin] + self._offset_counts[begin], 0)

    def _slide_within(self, lengths: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        full, offsets = self._full(lengths), self._offsets(self.K)
        start, offset = np.divmod(number, offsets)
        copied = np.full_like(number, self.K)
        tail = np.flatnonzero(number >= full * offsets)
        if len(tail):
            first = (lengths - full * self.k_t)[tail]
            begin = self._tail_index[first]
            target = (number - full * offsets)[tail] + self._sums[begin] - self._offset_counts[begin]
            at = np.searchsorted(self._sums, target, side="right")
            start[tail] = full[tail] + at - begin
            offset[tail] = target - self._sums[at] + self._offset_counts[at]
            copied[tail] = first - (at - begin) * self.k_t
        return start * self.k_t, offset * self.k_s, copied


class DocumentLayouts:
    """The layout of each document: the same for all, except that strides can differ."""

    def __init__(self, lengths: np.ndarray, *, content_stride: Any, offset_stride: Any, **options: Any) -> None:
        """Raises ValueError for an option outside its limits, and for strides that are not one per document."""
        strides = [
            per_document(name, value, len(lengths))
            for name, value in (("content_stride", content_stride), ("offset_stride", offset_stride))
        ]
        distinct, self._which = distinct_pairs(*strides)
        self.lengths = lengths
        self._layouts = [Layout(content_stride=k_t, offset_stride=k_s, **options) for k_t, k_s in distinct or [(1, 1)]]
        self.first = self._layouts[self._which[0] if len(lengths) else 0]
        S, asked = self.first.S, options["content_length"]
        if asked is not None and asked > S:
            log.warning("content_length=%d does not fit a frame of S=%d: spans have %d tokens", asked, S, S)
        self.strides = strides
        """(content_stride, offset_stride) of each document."""

    def counts(self) -> np.ndarray:
        """Number of spans of each document."""
        return self._each("counts")

    def starts(self) -> np.ndarray:
        """Number of different t of each document."""
        return self._each("starts")

    def distinct(self) -> np.ndarray:
        """Number of spans of each document of distinct (t, length)."""
        return self._each("distinct")

    def widths(self) -> np.ndarray | None:
        """Number of offsets of each start of each document; None if it differs between the starts of a document."""
        if self.first.kind == "slide_within" and self.first.tight:
            return None
        return self.counts() // np.maximum(self.starts(), 1)

    def spans(self, docs: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(t, s, length) of span `numbers` of document `docs`, for each pair."""
        if len(self._layouts) == 1:
            return self.first.spans(self.lengths[docs], numbers)
        t, s, length = (np.empty(len(docs), dtype=np.int64) for _ in range(3))
        which = self._which[docs]
        for i in np.unique(which).tolist():
            rows = which == i
            t[rows], s[rows], length[rows] = self._layouts[i].spans(self.lengths[docs[rows]], numbers[rows])
        return t, s, length

    def first_numbers(self, doc: int, start: np.ndarray) -> np.ndarray:
        """The number of the first span of each start (0, 1, ...) of a document."""
        layout = self._layouts[self._which[doc]]
        return layout.first_numbers(np.broadcast_to(self.lengths[doc], start.shape), start)

    def _each(self, name: str) -> np.ndarray:
        if len(self._layouts) == 1:
            return getattr(self.first, name)(self.lengths)
        values = np.zeros(len(self.lengths), dtype=np.int64)
        for i, layout in enumerate(self._layouts):
            rows = self._which == i
            values[rows] = getattr(layout, name)(self.lengths[rows])
        return values
