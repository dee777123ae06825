"""Maximal common passages against brute force, for every stride, alphabet and size of segments."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt.memorization import suffix_search
from niels_gpt.memorization.suffix_search import (
    DEPTH,
    NEIGHBORS,
    PAD,
    SEPARATOR,
    SuffixSearch,
    segment_slices,
    sort_segment,
    sort_suffixes,
)

STRIDES = (1, 2, 4, 8)


def opened(documents: list[bytes], stride: int) -> SuffixSearch:
    """The search over documents, as text_index.py writes them."""
    text = np.frombuffer(PAD + SEPARATOR.join(documents) + PAD, dtype=np.uint8)
    orders = [
        sort_segment(text[begin : end + DEPTH], end - begin, stride) for begin, end in segment_slices(len(text), stride)
    ]
    return SuffixSearch(text, np.concatenate(orders), stride)


def naive_matches(query: bytes, documents: list[bytes], shortest: int) -> set[tuple[int, int, int]]:
    """(start, end, position) of all maximal matches, byte by byte."""
    found = set()
    begin = len(PAD)
    for document in documents:
        for i, p in itertools.product(range(len(query)), range(len(document))):
            if i and p and query[i - 1] == document[p - 1]:
                continue  # not maximal
            length = 0
            while i + length < len(query) and p + length < len(document) and query[i + length] == document[p + length]:
                length += 1
            if length >= shortest:
                found.add((i, i + length, begin + p))
        begin += len(document) + len(SEPARATOR)
    return found


def found_by(search: SuffixSearch, query: bytes, shortest: int) -> set[tuple[int, int, int]]:
    matches = search.find(query, shortest)
    assert len({len(column) for column in matches}) == 1
    return set(zip(*(column.tolist() for column in matches), strict=True))


def letters(number: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(b"abcdefghijklmnopqrstuvwxyz"[:number]), max_size=60).map(bytes)


@st.composite
def cases(draw):
    """Documents of a small alphabet, and a query with parts of them."""
    alphabet = letters(draw(st.sampled_from([1, 2, 3, 26])))
    documents = draw(st.lists(alphabet, min_size=1, max_size=4))
    copied = [document[draw(st.integers(0, 20)) :][: draw(st.integers(0, 60))] for document in documents]
    query = b"".join(draw(st.permutations([*copied, draw(alphabet), draw(alphabet)])))
    return documents, query, draw(st.sampled_from(STRIDES)), draw(st.integers(1, 12)), draw(st.integers(4, 400))


def test_the_bisection_begins_between_two_keys() -> None:
    """Every 64th suffix has a key; where none has the first 8 bytes of a query, fewer than 64 suffixes are left."""
    data = np.random.default_rng(0).bytes(3000)
    queries = np.frombuffer(np.random.default_rng(1).bytes(800), dtype=np.uint64)
    low, high = opened([data], 1)._narrow(queries)
    assert (low >= 0).all() and (low <= high).all() and (high - low < 64).all()


@given(cases())
@example(([b""], b"", 8, 1, 4))
@example(([b"", b""], b"abc", 1, 1, 4))
@example(([b"a" * 60], b"a" * 60, 8, 1, 4))
def test_the_matches_are_those_of_brute_force(case):
    documents, query, stride, shortest, segment = case
    shortest += stride - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_search, "SEGMENT", segment)
        patch.setattr(suffix_search, "NEIGHBORS", 1000)
        patch.setattr(suffix_search, "_LANES", 64)
        patch.setattr(suffix_search, "_KEY_STEP", 3)
        found = found_by(opened(documents, stride), query, shortest)
    assert found == naive_matches(query, documents, shortest)


@pytest.mark.parametrize("stride", STRIDES)
def test_suffixes_are_in_order(stride):
    rng = np.random.default_rng(stride)
    text = bytes(rng.choice(list(b"ab"), 500).tolist()) * 4 + b"a" * 700
    order = sort_suffixes(np.frombuffer(text, dtype=np.uint8), stride).tolist()
    assert sorted(order) == list(range(-(-len(text) // stride)))
    suffixes = [text[i * stride :][:DEPTH] for i in order]
    assert all(first <= second for first, second in pairwise(suffixes))


def test_matches_longer_than_the_sorted_depth():
    """Copies that agree in the first DEPTH bytes and differ later: the longest is found, with both its ends."""
    rng = np.random.default_rng(0)
    common = bytes(rng.integers(97, 123, 2 * DEPTH, dtype=np.uint8))
    documents = [b"%d" % i + common + bytes([65 + i]) * 9 for i in range(20)]
    query = b"x7" + common + b"HHHHH."
    start, end, position = max(found_by(opened(documents, 8), query, 24), key=lambda match: match[1] - match[0])
    assert (start, end) == (1, len(query) - 1)
    assert position == len(PAD) + 7 * (len(documents[0]) + 1)


def test_frequent_passages_lose_at_most_the_start_of_a_match(monkeypatch):
    """Far more copies than neighbors are read: the end of every match is right, its start at most a stride late."""
    monkeypatch.setattr(suffix_search, "NEIGHBORS", 2)
    rng = np.random.default_rng(1)
    header = b"Permission is hereby granted, free of charge, to any person"
    documents = [
        bytes(rng.integers(97, 123, 6, dtype=np.uint8)) + header + bytes([97 + i % 26]) * 2
        for i in range(40 * NEIGHBORS)
    ]
    for i in rng.integers(0, len(documents), 20).tolist():
        query = b"##" + documents[i] + b"##"
        for stride in STRIDES:
            matches = found_by(opened(documents, stride), query, 40)
            best = max(matches, key=lambda match: match[1] - match[0])
            assert best[1] == len(query) - 2
            assert best[0] <= 2 + 6 + stride - 1


def test_no_match_extends_over_the_end_of_a_document():
    search = opened([b"the first document ends", b" and the second begins"], 1)
    assert found_by(search, b"the first document ends and the second begins", 10) == {
        (0, 23, len(PAD)),
        (23, 45, len(PAD) + 24),
    }
