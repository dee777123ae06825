"""Counts and spans by arithmetic, compared with a reference that tries every pair (t, s)."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice.layout import DocumentLayouts, Layout
from tests.splice import BOUNDS, CONTENT_MODES, schedules, spans

DEFAULTS = {
    "content_length": None,
    "content_stride": 1,
    "offset_stride": 1,
    "content_start_mode": "coverage_balanced",
    "min_copy_len": 2,
    "adaptive_k": True,
    "mode": "splice",
    "offset_bound": "tight",
}


def layout(S, **options):
    return Layout(S=S, **DEFAULTS | options)


def check(S, lengths, **options):
    """All lengths at once, in one call per method."""
    made = layout(S, **options)
    array = np.array(lengths, dtype=np.int64)
    expected = [spans(S=S, L=length, **options) for length in lengths]
    assert made.counts(array).tolist() == [len(found) for found in expected]
    assert made.starts(array).tolist() == [len({t for t, _, _ in found}) for found in expected]
    number = np.concatenate([np.arange(len(found)) for found in expected])
    repeated = np.repeat(array, [len(found) for found in expected])
    columns = made.spans(repeated, number)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [s for found in expected for s in found]
    shortest = made.shortest()
    assert spans(S=S, L=shortest, **options) or made.m > made.K
    assert not any(found for length, found in zip(lengths, expected, strict=True) if length < shortest)


@given(schedules(), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_any_layout_equals_the_reference(schedule, lengths):
    S, options = schedule
    check(S, lengths, **options)


@pytest.mark.parametrize(("mode", "bound"), [*itertools.product(CONTENT_MODES, BOUNDS)])
def test_all_small_frames_and_documents(mode, bound):
    for S, K in itertools.product(range(2, 6), (None, 2, 3)):
        check(S, range(1, 7), content_length=K, content_start_mode=mode, offset_bound=bound)


@given(st.integers(2, 9), st.integers(1, 5), st.integers(2, 10))
def test_slide_equals_the_reference(S, stride, min_copy_len):
    check(S, range(1, 20), mode="slide", content_stride=stride, min_copy_len=min_copy_len)


def test_content_is_the_span_length_of_each_document():
    lengths = np.array([1, 2, 3, 4, 5, 9])
    assert layout(6, content_length=4).content(lengths).tolist() == [0, 2, 3, 4, 4, 4]
    assert layout(6, content_length=4, min_copy_len=3).content(lengths).tolist() == [0, 0, 3, 4, 4, 4]
    assert layout(6, content_length=4, adaptive_k=False).content(lengths).tolist() == [0, 0, 0, 4, 4, 4]
    assert layout(5, mode="slide").content(lengths).tolist() == [0, 0, 0, 0, 5, 5]
    assert layout(5, mode="slide", min_copy_len=6).content(lengths).tolist() == [0] * 6


def test_content_length_is_limited_to_the_frame(caplog):
    """With one warning, also for many pairs of strides."""
    strides = {"content_stride": [1, 2, 3], "offset_stride": [3, 1, 2]}
    for K, warnings in ((6, 0), (7, 1)):
        layouts = DocumentLayouts(np.array([9, 8, 7]), S=6, **DEFAULTS | strides | {"content_length": K})
        assert layouts.first.K == 6
        assert sum("content_length=7" in record.getMessage() for record in caplog.records) == warnings


def test_triangle_of_a_billion_spans():
    """With K = S = L the suffix from t has t + 1 offsets: span t(t+1)/2 + s."""
    L = 60_000
    made = layout(L, content_start_mode="slide_within")
    assert made.counts(np.array([L])).tolist() == [(L - 1) * L // 2]
    expected = [(t, s, L - t) for t in (0, 1, 2, 3, 77, 40_000, L - 3, L - 2) for s in sorted({0, t // 2, t})]
    number = np.array([t * (t + 1) // 2 + s for t, s, _ in expected])
    columns = made.spans(np.full(len(number), L), number)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
