import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice import SpliceDocumentDataset
from tests.splice import NULL, check_dataset, check_example, document, example, origins, schedules, spans, tuples

N = NULL
FIVE = np.arange(5)
"""The document of the worked examples in the spec."""


def single(doc=FIVE, S=5, **options):
    return SpliceDocumentDataset(S=S, doc_tokens=doc, pad_token_id=options.pop("pad_token_id", N), **options)


def by_pair(ds):
    """(t, s) -> tokens of the example."""
    return {pair: ds[i].tokens.tolist() for i, pair in enumerate(tuples(ds.pairs()))}


@pytest.mark.parametrize(
    ("S", "L", "options", "count"),
    [
        (5, 5, {"content_length": 3, "content_start_mode": "slide_within"}, 13),
        (5, 5, {"content_length": 3, "content_start_mode": "anchor_start"}, 3),
        (5, 3, {"content_start_mode": "slide_within"}, 7),
        (6, 6, {"content_length": 4, "content_start_mode": "slide_within", "content_stride": 2, "offset_stride": 2}, 7),
        (6, 6, {"content_length": 4, "content_start_mode": "slide_within", "min_copy_len": 4}, 9),
    ],
)
def test_golden_counts(S, L, options, count):
    ds = single(document(L), S, **options)
    assert len(ds) == count
    assert ds.pairs().shape == (count, 2)


def test_worked_example_a():
    ds = single(content_length=3, content_start_mode="slide_within")
    wanted = {
        (0, 0): [0, 1, 2, N, N],
        (0, 1): [N, 0, 1, 2, N],
        (0, 2): [N, N, 0, 1, 2],
        (1, 0): [1, 2, 3, N, N],
        (1, 1): [N, 1, 2, 3, N],
        (1, 2): [N, N, 1, 2, 3],
        (2, 0): [2, 3, 4, N, N],
        (2, 1): [N, 2, 3, 4, N],
        (2, 2): [N, N, 2, 3, 4],
        (3, 0): [3, 4, N, N, N],
        (3, 1): [N, 3, 4, N, N],
        (3, 2): [N, N, 3, 4, N],
        (3, 3): [N, N, N, 3, 4],
    }
    assert tuples(ds.pairs()) == list(wanted)
    assert by_pair(ds) == wanted
    batch = ds.get_batch(np.arange(13))
    pairs, last = [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]], np.eye(4, 5, dtype=int).tolist()
    assert batch.loss_mask.tolist() == 3 * pairs + last
    from_left, one, two, three = [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]
    assert batch.segment_ids.tolist() == 3 * [from_left, one, two] + [from_left, one, two, three]
    assert batch.origin.length.tolist() == 9 * [3] + 4 * [2]


def test_worked_example_b():
    ds = single(content_length=2, content_start_mode="slide_within")
    wanted = {
        (t, s): [N] * s + [t, t + 1] + [N] * (3 - s)
        for t, s in itertools.product(range(4), range(4))  # every pair of neighbors at every position
    }
    assert tuples(ds.pairs()) == list(wanted)
    assert by_pair(ds) == wanted
    desired = ds[list(wanted).index((1, 0))]
    check_example(desired, ([1, 2, N, N, N], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]), (0, 1, 0, 2), 5)


def test_truncate_shortens_the_span_at_the_right_end():
    ds = single(content_start_mode="anchor_start", offset_bound="truncate")
    assert by_pair(ds) == {
        (0, 0): [0, 1, 2, 3, 4],
        (0, 1): [N, 0, 1, 2, 3],
        (0, 2): [N, N, 0, 1, 2],
        (0, 3): [N, N, N, 0, 1],
    }
    assert ds[2].loss_mask.tolist() == [0, 0, 1, 1, 0]
    assert [e.origin.length for e in ds] == [5, 4, 3, 2]


def test_short_document_at_all_offsets():
    ds = single([1, 2, 3], content_start_mode="anchor_start")
    wanted = [
        ([1, 2, 3, N, N], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]),
        ([N, 1, 2, 3, N], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]),
        ([N, N, 1, 2, 3], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]),
    ]
    assert len(ds) == 3
    for s in range(3):
        check_example(ds[s], wanted[s], (0, 0, s, 3), 5)


def test_coverage_balanced_is_the_default_and_right_aligned():
    ds = single(document(7), 8, content_length=4)
    assert tuples(ds.pairs()) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert ds[3].tokens.tolist() == [N, N, N, N, 1003, 1004, 1005, 1006]
    named = single(document(7), 8, content_length=4, content_start_mode="coverage_balanced", offset_stride=3)
    assert tuples(named.pairs()) == tuples(ds.pairs())  # offset_stride has no effect here


def test_cyclic_roll_wraps_around_and_supervises_the_seam():
    ds = single([1, 2, 3, 4], 5, content_length=3, content_start_mode="cyclic_roll", offset_stride=2)
    assert by_pair(ds) == {
        (0, 0): [1, 2, 3, N, N],
        (0, 2): [N, N, 1, 2, 3],
        (1, 0): [2, 3, 4, N, N],
        (1, 2): [N, N, 2, 3, 4],
        (2, 0): [3, 4, 1, N, N],
        (2, 2): [N, N, 3, 4, 1],
        (3, 0): [4, 1, 2, N, N],
        (3, 2): [N, N, 4, 1, 2],
    }
    assert ds[6].loss_mask.tolist() == [1, 1, 0, 0, 0]


def test_slide_yields_full_windows():
    ds = single(document(9), 4, mode="slide", content_stride=2)
    assert tuples(ds.pairs()) == [(0, 0), (2, 0), (4, 0)]
    for i, t in enumerate((0, 2, 4)):
        check_example(ds[i], ([1000 + t + j for j in range(4)], [1, 1, 1, 0], [1, 1, 1, 1]), (0, t, 0, 4), 4)


@given(schedule=schedules(), slide=st.booleans(), L=st.integers(1, 14))
def test_every_example_equals_the_naive_reference(schedule, slide, L):
    S, options = schedule
    if slide:
        options = {"mode": "slide", "content_stride": options["content_stride"]}
    wanted = spans(S=S, L=L, **options)
    doc = document(L)
    if not wanted:
        with pytest.raises(ValueError):
            single(doc, S, **options)
        return
    ds = single(doc, S, **options)
    assert tuples(ds.pairs()) == [(t, s) for t, s, _ in wanted]
    check_dataset(ds, [doc], [(0, *span) for span in wanted], S)


def test_edge_weights_by_hand():
    # L=6, K=3: d = 1 2 2 1, so the weights are 3, 3/2, 3/2, 3 and the CDF 3/9, 4.5/9, 6/9, 1.
    # The quantiles 1/8, 3/8, 5/8, 7/8 fall on the starts 0, 1, 2, 3; with alpha 3 on 0, 0, 3, 3.
    assert single(document(6), 8, content_length=3, alpha=1.0).pairs()[:, 0].tolist() == [0, 1, 2, 3]
    assert single(document(6), 8, content_length=3, alpha=3.0).pairs()[:, 0].tolist() == [0, 0, 3, 3]


def test_negative_and_out_of_range_indices():
    ds = single(content_length=3, content_start_mode="slide_within")
    pairs = tuples(ds.pairs())
    for i in range(13):
        for index in (i, i - 13, np.int64(i), np.int32(i - 13)):
            assert (ds[index].origin.t, ds[index].origin.s) == pairs[i]
    for index in (13, -14, 10**20):
        with pytest.raises(IndexError):
            ds[index]
    for indices in ([0, 13], [-14], np.array([5, 100])):
        with pytest.raises(IndexError):
            ds.get_batch(indices)
    assert [(e.origin.t, e.origin.s) for e in ds] == pairs
    with pytest.raises(ValueError, match="pad_token_id"):
        single(pad_token_id=None)


@pytest.mark.parametrize("make", [list, np.array, lambda i: np.array(i, dtype=np.int32), tuple])
def test_batch_rows_follow_the_requested_order(make):
    ds = single(content_length=3, content_start_mode="slide_within")
    batch = ds.get_batch(make([12, 0, -1, 5, 5]))
    pairs = tuples(ds.pairs())
    assert [(t, s) for _, t, s, _ in origins(batch)] == [pairs[i] for i in (12, 0, 12, 5, 5)]
    for row, i in enumerate((12, 0, 12, 5, 5)):
        for field in ("tokens", "loss_mask", "segment_ids"):
            assert np.array_equal(getattr(batch, field)[row], getattr(ds[i], field))


def test_examples_are_copies():
    ds = single(content_length=3, content_start_mode="slide_within")
    first, batch = ds[1], ds.get_batch([1, 2])
    first.tokens[:], first.loss_mask[:], first.segment_ids[:] = 7, 7, 7
    batch.tokens[:], batch.loss_mask[:], batch.segment_ids[:] = 7, 7, 7
    check_example(ds[1], example(FIVE, 5, 0, 1, 3), (0, 0, 1, 3), 5)
    assert ds.get_batch([1]).tokens.tolist() == [[N, 0, 1, 2, N]]
    assert ds.get_batch([1]).loss_mask.tolist() == [[0, 1, 1, 0, 0]]


@pytest.mark.parametrize(("pad", "eos", "filler"), [(7, None, 7), (0, None, 0), (0, 9, 0), (None, 9, 9), (None, 0, 0)])
def test_filler_token(pad, eos, filler):
    options = {"content_length": 3, "content_start_mode": "slide_within"}
    wanted = [(0, *span) for span in spans(S=5, L=5, **options)]
    check_dataset(single(pad_token_id=pad, eos_token_id=eos, **options), [FIVE], wanted, 5, filler=filler)


@pytest.mark.parametrize("alpha", [[0.5], (0.5,), np.array([0.5]), np.float64(0.5)])
def test_alpha_as_one_value_per_document(alpha):
    options = {"S": 8, "doc_tokens": list(range(20)), "pad_token_id": 0, "content_length": 4}
    expected = SpliceDocumentDataset(**options, alpha=0.5).pairs().tolist()
    assert SpliceDocumentDataset(**options, alpha=alpha).pairs().tolist() == expected
    assert SpliceDocumentDataset(**options, alpha=np.zeros(1)).pairs().tolist() == [[t, 4] for t in range(17)]
    with pytest.raises(ValueError, match=r"alpha has 2 values, but there are 1"):
        SpliceDocumentDataset(**options, alpha=np.array([0.5, 1.0]))
