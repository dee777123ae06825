"""The order of an epoch when only one axis is shuffled: the starts t of each document, or the offsets s of each start.

Documents follow each other. The examples of a document form rows: one row per start, with its offsets in order. Content
shuffling permutes the rows, offset shuffling permutes the examples within each row. If all rows have the same width,
any position takes constant time; otherwise a table per document keeps the prefix sums of the permuted rows: one entry
per start, none per example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from niels_gpt.splice.permutation import Permutation, mix
from niels_gpt.system.rng import derive_seed

MAX_ROWS = 1 << 24
"""The most rows in tables, of one document and of all tables in memory: 20 bytes each, 336 MB."""
CHUNK = 1 << 18
"""Rows permuted at a time, so that temporary arrays stay small beside the table."""


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
        self,
        shuffles: AxisShuffles,
        ends: np.ndarray,
        widths: np.ndarray | None,
        row_begins: Callable[[int], np.ndarray],
        max_rows: np.ndarray | None = None,
    ) -> None:
        """`ends`: where the examples of each document end. `widths`: examples per start of each document; None if they
        differ within a document. `row_begins(i)`: the first example of each row of document i, at most `max_rows[i]`.
        """
        self._shuffles, self._ends, self._widths, self._row_begins = shuffles, ends, widths, row_begins
        self._max_rows = max_rows
        self._begins = np.concatenate(([0], ends[:-1]))
        self._tables: dict[tuple[int, int], RowTable] = {}

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
                images[rows] = self._ragged(
                    i, within[rows], *(own ^ mix(np.array([i]))[0] for own in (content, offsets))
                )
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

    def _ragged(self, document: int, within: np.ndarray, content: np.uint64, offsets: np.uint64) -> np.ndarray:
        """Rows of different widths. `content` and `offsets`: the seeds of this document and epoch."""
        row, at, widths = self._table(document, int(content))(within)
        if self._shuffles.offsets:
            at = Permutation(widths, np.full(len(at), offsets))(at)
        return row + at

    def _table(self, document: int, seed: int) -> RowTable:
        """The table of a document. The oldest tables are dropped when all together have more than MAX_ROWS rows."""
        key = (document, seed if self._shuffles.content else 0)
        if key not in self._tables:
            assert self._max_rows is not None
            begins = next((table.begins for (of, _), table in self._tables.items() if of == document), None)
            while self._tables and self._max_rows[document] + sum(map(len, self._tables.values())) > MAX_ROWS:
                del self._tables[next(iter(self._tables))]
            if begins is None:
                begins = self._row_begins(document)
            size = int(self._ends[document] - self._begins[document])
            self._tables[key] = RowTable(begins, size, seed if self._shuffles.content else None)
        return self._tables[key]


class RowTable:
    """Finds the row at a position of a document whose rows have different widths and are permuted."""

    def __init__(self, begins: np.ndarray, size: int, seed: int | None) -> None:
        """`begins`: the first example of each row, in ascending order. `size`: the number of examples. `seed`: of the
        permutation of the rows; None: they stay in order.
        """
        self.begins = begins
        self._order = None if seed is None else np.empty(len(begins), dtype=np.int32)
        self._ends = np.empty(len(begins), dtype=np.int64)
        """Where the row at each place ends, counted in examples."""
        permutation = None if seed is None else Permutation(len(begins), seed)
        for first in range(0, len(begins), CHUNK):
            rows = np.arange(first, min(first + CHUNK, len(begins)))
            if permutation is not None and self._order is not None:
                rows = permutation(rows)
                self._order[first : first + len(rows)] = rows
            last = rows == len(begins) - 1
            after = np.where(last, size, begins[np.where(last, 0, rows + 1)])
            self._ends[first : first + len(rows)] = after - begins[rows]
        np.cumsum(self._ends, out=self._ends)

    def __len__(self) -> int:
        return len(self.begins)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(first example of the row, position within the row, width of the row) of each position."""
        place = np.searchsorted(self._ends, positions, side="right")
        before = np.where(place > 0, self._ends[place - 1], 0)
        row = place if self._order is None else self._order[place]
        return self.begins[row], positions - before, self._ends[place] - before
