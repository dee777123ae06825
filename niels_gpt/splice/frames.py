"""What splice datasets give: frames of S tokens with a span of a document in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Origin(NamedTuple):
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
    origin: Origin


class Spans(NamedTuple):
    """Which parts of which documents, and where in the frame: arrays (n,) of int64."""

    doc: np.ndarray
    t: np.ndarray
    s: np.ndarray
    length: np.ndarray


class Plan(NamedTuple):
    """The examples of a training step."""

    indices: np.ndarray
    """(B,) numbers of examples, within the dataset of the first `documents` documents."""
    epochs: np.ndarray
    """(B,) how many times all of them were seen before."""
    documents: int
    """How many documents are in use (all, unless there is a curriculum)."""
