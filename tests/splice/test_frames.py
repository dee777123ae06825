"""Frames around spans, compared with frames filled position by position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice.frames import FrameBuilder, Spans
from tests.splice import NULL, document, example, origins

DOC = document(30)


def read(doc, t, out):
    out[:] = DOC[t : t + len(out)]


def check(builder, S, rows):
    """rows: (t, s, length)"""
    spans = Spans(*(np.array(column, dtype=np.int64) for column in zip(*[(0, *row) for row in rows], strict=True)))
    frames = builder.build(spans, read)
    expected = [example(DOC, S, *row) for row in rows]
    for field, column in zip(("tokens", "loss_mask", "segment_ids"), zip(*expected, strict=True), strict=True):
        array = getattr(frames, field)
        assert array.dtype == np.int32
        assert array.tolist() == list(column), field
    assert origins(frames) == [(0, *row) for row in rows]


@st.composite
def batches(draw):
    S = draw(st.integers(2, 9))
    span = st.integers(2, S).flatmap(
        lambda length: st.tuples(st.integers(0, 30 - length), st.integers(0, S - length), st.just(length))
    )
    rows = draw(st.lists(span, min_size=1, max_size=5))
    if draw(st.booleans()):  # all at the same position: filled for all rows at once
        rows = [(row[0], *rows[0][1:]) for row in rows if row[0] + rows[0][2] <= 30]
    return S, rows


@given(batches(), batches())
def test_frames_equal_the_reference(first, second):
    """Two batches with one builder: it reuses the mask of the last length."""
    S = max(first[0], second[0])
    builder = FrameBuilder(S, NULL)
    for _, rows in (first, second):
        if rows:
            check(builder, S, rows)


def test_same_length_at_different_positions_and_the_reverse():
    builder = FrameBuilder(6, NULL)
    check(builder, 6, [(0, 0, 4), (1, 2, 4)])
    check(builder, 6, [(0, 1, 4), (1, 1, 5)])
    check(builder, 6, [(3, 0, 6), (4, 0, 6)])
    check(builder, 6, [(3, 4, 2)])


def test_empty_batch():
    empty = np.empty(0, dtype=np.int64)
    frames = FrameBuilder(5, NULL).build(Spans(empty, empty, empty, empty), read)
    assert frames.tokens.shape == frames.loss_mask.shape == frames.segment_ids.shape == (0, 5)


@given(batches())
def test_a_token_before_the_span_and_a_segment_after_it(batch):
    S, rows = batch
    spans = Spans(*(np.array(column, dtype=np.int64) for column in zip(*[(0, *row) for row in rows], strict=True)))
    plain = FrameBuilder(S, NULL).build(spans, read)
    frames = FrameBuilder(S, NULL, before=99, trailing_segment=0).build(spans, read)
    assert frames.loss_mask.tolist() == plain.loss_mask.tolist()
    for i, (_, s, length) in enumerate(rows):
        tokens = plain.tokens[i].tolist()
        if s:
            tokens[s - 1] = 99
        assert frames.tokens[i].tolist() == tokens
        assert frames.segment_ids[i].tolist() == [int(s <= at < s + length) for at in range(S)]
