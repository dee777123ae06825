"""Packed frames: several spans in one frame, each with separate segment ids and positions.

A span attends only to itself and keeps the positions it has in an unpacked frame. Loss and gradients are therefore
those of one frame per span, without computing the filler.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from niels_gpt.splice.frames import SpanOrigin, Spans


class SpanReader(Protocol):
    """The part of a dataset that packing needs."""

    S: int
    pad_token_id: int

    def read(self, doc: int, t: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens of a document from t on."""


class PackedFrames(NamedTuple):
    """m frames of `width` <= S tokens; arrays (m, width) of int32."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    """1 where a position predicts the next token: on all tokens of each span but its last."""
    segment_ids: np.ndarray
    """1, 2, ... for the spans of a frame; 0 for filler."""
    positions: np.ndarray
    """Position of each token in an unpacked frame; 0 for filler."""
    origin: SpanOrigin
    """The n spans, in input order."""
    frame: np.ndarray
    """(n,) frame of each span."""
    start: np.ndarray
    """(n,) first position of the span in that frame."""


def arrange(lengths: np.ndarray, S: int) -> tuple[np.ndarray, np.ndarray]:
    """(frame, start) of each span by first-fit decreasing: longest span first, into the first frame that fits."""
    order = np.argsort(-lengths, kind="stable")
    frame, start = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    filled = np.zeros(len(lengths), dtype=np.int64)
    opened = 0
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fits = np.flatnonzero(filled[:opened] <= S - length)
        at = int(fits[0]) if len(fits) else opened
        opened = max(opened, at + 1)
        frame[i], start[i] = at, filled[at]
        filled[at] += length
    return frame, start


def pack(dataset: SpanReader, spans: Spans) -> PackedFrames:
    """Pack the spans of a dataset into frames (first-fit decreasing), trimmed to the longest frame."""
    frame, start = arrange(spans.length, dataset.S)
    n = len(frame)
    width = int((start + spans.length).max()) if n else dataset.S
    shape = (int(frame.max()) + 1 if n else 0, width)
    tokens = np.full(shape, dataset.pad_token_id, dtype=np.int32)
    mask, segments, positions = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    count = np.zeros(shape[0], dtype=np.int64)
    columns = (spans.doc, spans.t, spans.s, spans.length, frame, start)
    for doc, t, s, length, row, at in zip(*(column.tolist() for column in columns), strict=True):
        end = at + length
        count[row] += 1
        dataset.read(doc, t, tokens[row, at:end])
        mask[row, at : end - 1] = 1
        segments[row, at:end] = count[row]
        positions[row, at:end] = np.arange(s, s + length)
    return PackedFrames(tokens, mask, segments, positions, SpanOrigin(*spans), frame, start)
