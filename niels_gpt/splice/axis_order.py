"""The order of an epoch when only one axis is shuffled: the starts t of each document, or the offsets s of each start.

Documents follow each other. The examples of a document form rows: one row per start, with its offsets in order. Content
shuffling permutes the rows, offset shuffling permutes the examples within each row. If all rows have the same width,
any position takes constant time; otherwise the prefix sums of the permuted rows are kept in a table per document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from niels_gpt.splice.permutation import Permutation, mix
from niels_gpt.system.rng import derive_seed

MAX_TABLE = 1 << 24
"""The most examples of a document with rows of different widths: a table of 128 MB."""


@dataclass(frozen=True)
class AxisShuffles:
    """Which axes are shuffled, and by which seed; None: the seed of the run."""

    offsets: bool = False
    offset_seed: int | None = None
    content: bool = False
    content_seed: int | None = None

    def __bool__(self) -> bool:
        return self.offsets or self.content


class AxisOrder:
    """Maps positions of an epoch to example indices, document by document."""

    def __init__(
        self, shuffles: AxisShuffles, ends: np.ndarray, widths: np.ndarray | None, starts: Callable[[int], np.ndarray]
    ) -> None:
        """`ends`: where the examples of each document end. `widths`: examples per start of each document; None if they
        differ within a document. `starts(i)`: t of every example of document i, in enumeration order.
        """
        self._shuffles, self._ends, self._widths, self._starts = shuffles, ends, widths, starts
        self._begins = np.concatenate(([0], ends[:-1]))
        self._tables: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __call__(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The example index at each position of an epoch."""
        document = np.searchsorted(self._ends, positions, side="right")
        within = positions - self._begins[document]
        content, offsets = (
            np.uint64(derive_seed(seed if own is None else own, f"splice {axis}", epoch))
            for axis, own in (("content", self._shuffles.content_seed), ("offsets", self._shuffles.offset_seed))
        )
        of_document = mix(document)
        if self._widths is None:
            images = np.empty_like(within)
            for i in np.unique(document).tolist():
                rows = document == i
                images[rows] = self._ragged(i, within[rows], epoch, content ^ of_document[rows], offsets)
        else:
            sizes, widths = (self._ends - self._begins)[document], self._widths[document]
            images = self._even(within, sizes, widths, content ^ of_document, offsets ^ of_document)
        return self._begins[document] + images

    def _even(
        self, within: np.ndarray, sizes: np.ndarray, widths: np.ndarray, content: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Rows of equal width; an incomplete last row (repeated documents) stays the last."""
        row, at = np.divmod(within, widths)
        full = sizes // widths
        if self._shuffles.content:
            inside = np.flatnonzero(row < full)
            row[inside] = Permutation(full[inside], content[inside])(row[inside])
        if self._shuffles.offsets:
            at = Permutation(np.where(row < full, widths, sizes - full * widths), offsets)(at)
        return row * widths + at

    def _ragged(
        self, document: int, within: np.ndarray, epoch: int, content: np.ndarray, offsets: np.uint64
    ) -> np.ndarray:
        """Rows of different widths."""
        key = (document, epoch if self._shuffles.content else 0)
        if key not in self._tables:
            if sum(len(table[0]) for table in self._tables.values()) > MAX_TABLE:
                self._tables.clear()
            self._tables[key] = self._table(document, content[0])
        order, begins, ends = self._tables[key]
        place = np.searchsorted(ends, within, side="right")
        widths = np.diff(ends, prepend=0)[place]
        at = within - (ends[place] - widths)
        if self._shuffles.offsets:
            at = Permutation(widths, np.full(len(at), offsets ^ mix(np.array([document]))[0]))(at)
        return begins[order[place]] + at

    def _table(self, document: int, seed: np.uint64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the row at each place, the first example of each row, where the row at each place ends)."""
        size = int(self._ends[document] - self._begins[document])
        if size > MAX_TABLE:
            raise ValueError(
                f"shuffle_content and shuffle_offsets need a table of the {size:,} examples of document {document}, "
                f"more than {MAX_TABLE:,}: use shuffle, a longer content_stride, or content_start_mode="
                "'coverage_balanced'"
            )
        t = self._starts(document)
        begins = np.flatnonzero(np.concatenate(([True], t[1:] != t[:-1])))
        order = np.arange(len(begins))
        if self._shuffles.content:
            order = Permutation(len(begins), int(seed))(order)
        return order, begins, np.cumsum(np.diff(begins, append=size)[order])
