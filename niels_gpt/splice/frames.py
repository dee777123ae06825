"""What splice datasets give: frames of S tokens with a span of a document in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class SpanOrigin(NamedTuple):
    """Where the tokens of a frame come from: `length` tokens of document `doc_idx` from `t` on, at place `s`.

    Integers for one example, arrays (n,) for a batch.
    """

    doc_idx: int | np.ndarray
    t: int | np.ndarray
    s: int | np.ndarray
    length: int | np.ndarray


class Frames(NamedTuple):
    """One example, arrays of shape (S,), or a batch of n, arrays of shape (n, S); all int32."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    """1 where a position predicts the next token: on the span but its last token."""
    segment_ids: np.ndarray
    """1 from the span's beginning on, 0 before it: the span does not attend to what lies before it."""
    origin: SpanOrigin


class Spans(NamedTuple):
    """Which parts of which documents, and where in the frame: arrays (n,) of int64."""

    doc: np.ndarray
    t: np.ndarray
    s: np.ndarray
    length: np.ndarray


class StepPlan(NamedTuple):
    """The examples of a training step."""

    indices: np.ndarray
    """(B,) numbers of examples, within the dataset of the first `documents` documents."""
    epochs: np.ndarray
    """(B,) how many times all of them were seen before."""
    documents: int
    """How many documents are in use (all, unless there is a curriculum)."""


class FrameBuilder:
    """Lays spans into frames of S tokens.

    A row of segment ids is S numbers of 0 ... 0 1 ... 1, one of the loss mask has zeros after them too. They are copied
    from templates, and where all spans of a batch lie at one place, for all rows at once.
    """

    def __init__(self, S: int, pad: int) -> None:
        self.S, self.pad = S, pad
        self._steps = np.repeat(np.array([0, 1], dtype=np.int32), S)
        self._masked, self._masks = 0, self._steps

    def build(self, spans: Spans, read: Callable[[int, int, np.ndarray], None]) -> Frames:
        """The frames of spans; `read(doc, t, out)` fills `out` with tokens."""
        n, S = len(spans.doc), self.S
        tokens, mask, segments = (np.empty((n, S), dtype=np.int32) for _ in range(3))
        rows = list(zip(*(part.tolist() for part in spans), strict=True))
        if len(rows) > 1 and all(row[2:] == rows[0][2:] for row in rows):
            self._surround(tokens.T, mask, segments, *rows[0][2:])
        else:
            for i, (_, _, s, length) in enumerate(rows):
                self._surround(tokens[i], mask[i], segments[i], s, length)
        for row, (doc, t, s, length) in zip(tokens, rows, strict=True):
            read(doc, t, row[s : s + length])
        return Frames(tokens, mask, segments, SpanOrigin(*spans))

    def _surround(self, tokens: np.ndarray, mask: np.ndarray, segments: np.ndarray, s: int, length: int) -> None:
        """Fill what is not tokens of one row, or of all (tokens transposed)."""
        S = self.S
        if s:
            tokens[:s] = self.pad
        if s + length < S:
            tokens[s + length :] = self.pad
        mask[:] = self._mask(length)[S - s : 2 * S - s]
        segments[:] = self._steps[S - s : 2 * S - s]

    def _mask(self, length: int) -> np.ndarray:
        """S zeros, length - 1 ones, zeros; that of the last length is kept."""
        if self._masked != length:
            self._masks = np.zeros(2 * self.S, dtype=np.int32)
            self._masks[self.S : self.S + length - 1] = 1
            self._masked = length
        return self._masks
