"""Frames of S tokens with a span of a document in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class SpanOrigin(NamedTuple):
    """Origin of the tokens of a frame: `length` tokens of document `doc_idx` from `t` on, at position `s`.

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
    """1 where a position predicts the next token: on all tokens of the span but the last."""
    segment_ids: np.ndarray
    """0 before the span, 1 from its first token on: the span does not attend to what precedes it. With
    trailing_segment_zero also 0 after the span."""
    origin: SpanOrigin


class Spans(NamedTuple):
    """Ranges of documents and their positions in the frame: arrays (n,) of int64."""

    doc: np.ndarray
    t: np.ndarray
    s: np.ndarray
    length: np.ndarray


class StepPlan(NamedTuple):
    """The examples of a training step."""

    indices: np.ndarray
    """(B,) example indices within the dataset of the first `documents` documents."""
    epochs: np.ndarray
    """(B,) epoch of each example."""
    documents: int
    """Number of documents in use (all, unless there is a curriculum)."""


class FrameBuilder:
    """Copies spans into frames of S tokens.

    A row of segment ids is 0 ... 0 1 ... 1; a row of the loss mask is 0 ... 0 1 ... 1 0 ... 0. Both are copied from
    templates, for all rows at once if all spans of a batch have the same position and length.
    """

    def __init__(self, S: int, pad: int, *, before: int | None = None, trailing_segment: int = 1) -> None:
        """`before`: token at s - 1; None: padding. `trailing_segment`: segment of the padding after the span."""
        self.S, self.pad, self.before, self.trailing_segment = S, pad, before, trailing_segment
        self._steps = np.repeat(np.array([0, 1], dtype=np.int32), S)
        self._mask_length, self._mask_template = 0, self._steps

    def build(self, spans: Spans, read: Callable[[int, int, np.ndarray], None]) -> Frames:
        """The frames of spans; `read(doc, t, out)` fills `out` with tokens."""
        n, S = len(spans.doc), self.S
        tokens, mask, segments = (np.empty((n, S), dtype=np.int32) for _ in range(3))
        rows = list(zip(*(column.tolist() for column in spans), strict=True))
        if len(rows) > 1 and all(row[2:] == rows[0][2:] for row in rows):
            self._surround(tokens.T, mask, segments, *rows[0][2:])
        else:
            for i, (_, _, s, length) in enumerate(rows):
                self._surround(tokens[i], mask[i], segments[i], s, length)
        for row, (doc, t, s, length) in zip(tokens, rows, strict=True):
            read(doc, t, row[s : s + length])
        return Frames(tokens, mask, segments, SpanOrigin(*spans))

    def _surround(self, tokens: np.ndarray, mask: np.ndarray, segments: np.ndarray, s: int, length: int) -> None:
        """Fill the padding, loss mask and segment ids of one row, or of all rows (tokens transposed)."""
        S = self.S
        if s:
            tokens[:s] = self.pad
            if self.before is not None:
                tokens[s - 1] = self.before
        if s + length < S:
            tokens[s + length :] = self.pad
        mask[:] = self._mask(length)[S - s : 2 * S - s]
        segments[:] = self._steps[S - s : 2 * S - s]
        if not self.trailing_segment:
            segments[..., s + length :] = 0

    def _mask(self, length: int) -> np.ndarray:
        """S zeros, length - 1 ones, zeros to 2 S; the template of the last length is reused."""
        if self._mask_length != length:
            self._mask_template = np.zeros(2 * self.S, dtype=np.int32)
            self._mask_template[self.S : self.S + length - 1] = 1
            self._mask_length = length
        return self._mask_template
