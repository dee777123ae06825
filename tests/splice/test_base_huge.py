"""Sizes that cannot be enumerated, against closed forms."""

import math
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from tests.splice import NULL, origins


def single(doc, S, **options):
    return SpliceDocumentDataset(S=S, doc_tokens=doc, pad_token_id=NULL, **options)


def multi(docs, S, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=docs, pad_token_id=NULL, **options)


def test_billion_pairs_use_little_memory():
    doc = np.arange(40_000, dtype=np.int32)
    tracemalloc.start()
    try:
        ds = single(doc, 40_000, content_length=2, content_start_mode="slide_within")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8e6
    m = 39_999  # offsets of every start
    assert len(ds) == m * m == 1_599_920_001
    indices = [0, 1, m - 1, m, 123_456_789, 10**9, m * m - 2, m * m - 1]
    assert origins(ds.get_batch(indices)) == [(0, i // m, i % m, 2) for i in indices]
    assert (ds[-1].origin.t, ds[-1].origin.s) == (39_998, 39_998)
    assert ds[-1].tokens[-2:].tolist() == [39_998, 39_999]
    with pytest.raises(IndexError):
        ds[m * m]


COUNT = 100_000


class Many(Sequence):
    """Many documents of 2, 3, 4, 5, 2, 3, ... tokens that use no memory."""

    kinds = tuple(np.arange(length, dtype=np.int32) + 10 * length for length in (2, 3, 4, 5))

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        if not 0 <= number < COUNT:
            raise IndexError(number)
        return self.kinds[number % 4]


# K = 3: documents of 2, 3, 4, 5 tokens have 1, 1, 2, 3 starts.
STARTS = (1, 1, 2, 3)


def origin_of(number, t):
    """Origin of the span at t of document `number`, with S = 8 and K = 3."""
    length = min(3, len(Many.kinds[number % 4]))
    return number, t, 8 - length, length


def test_many_documents_by_coverage():
    ds = multi(Many(), S=8, content_length=3)
    assert len(ds) == 7 * COUNT // 4
    cycle = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    indices = [0, 1, 6, 7, 8, 77_777, 100_001, len(ds) - 2, len(ds) - 1]
    wanted = [origin_of(4 * (i // 7) + cycle[i % 7][0], cycle[i % 7][1]) for i in indices]
    assert origins(ds.get_batch(indices)) == wanted
    origin = ds[len(ds) - 1].origin
    assert (origin.doc_idx, origin.t, origin.s, origin.length) == (COUNT - 1, 2, 5, 3)
    assert ds[-1].tokens.tolist() == [NULL] * 5 + [52, 53, 54]
    with pytest.raises(IndexError):
        ds[len(ds)]


def test_many_documents_by_temperature():
    ds = multi(Many(), S=8, content_length=3, balance_mode="by_temperature", balance_tau=1.0, epoch_length=7 * COUNT)
    assert len(ds) == 7 * COUNT
    assert np.array_equal(ds.quotas, np.tile([4, 6, 8, 10], COUNT // 4))
    number, j = 4 * 12_345 + 3, 7
    start = math.floor(Fraction(15, 2) * 3 / 10)
    assert origins(ds.get_batch([28 * 12_345 + 18 + j])) == [origin_of(number, start)]
    assert origins(ds.get_batch([-1])) == [origin_of(COUNT - 1, 2)]


def test_many_documents_as_a_stream():
    ds = multi(Many(), S=8, content_length=3, sampler="stream", epoch_length=10**12)
    assert len(ds) == 10**12
    indices = [0, 5, 10**9, 10**12 - 1]
    drawn = origins(ds.get_batch(indices))
    assert drawn == origins(ds.get_batch(indices))
    assert drawn != origins(ds.get_batch(indices, epoch=1))
    for number, t, s, length in drawn:
        assert (number, t, s, length) == origin_of(number, t)
        assert t < STARTS[number % 4]
    with pytest.raises(IndexError):
        ds[10**12]


def test_billions_of_pairs_of_several_documents():
    docs = [np.arange(length, dtype=np.int32) for length in (40_000, 3, 30_000)]
    options = {"S": 40_000, "content_length": 2, "content_start_mode": "slide_within"}
    ds = multi(docs, **options)
    m = 39_999  # offsets of every start
    borders = [0, m * m, m * m + 2 * m, m * m + 2 * m + 29_999 * m]
    assert len(ds) == borders[-1]
    for number in range(3):
        first, last = borders[number], borders[number + 1] - 1
        assert origins(ds.get_batch([first, last])) == [(number, 0, 0, 2), (number, len(docs[number]) - 2, m - 1, 2)]
    equal = multi(docs, **options, balance_mode="by_document")
    assert len(equal) == 3 * m * m
    for j in (0, 2 * m - 1, 2 * m, 10**9):
        inner = j % (2 * m)
        assert origins(equal.get_batch([m * m + j])) == [(1, inner // m, inner % m, 2)]
