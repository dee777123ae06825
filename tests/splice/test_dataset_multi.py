import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from tests.splice import (
    NULL,
    by_coverage,
    by_document,
    by_quota,
    check_dataset,
    check_example,
    document,
    documents,
    schedules,
    spans,
    tuples,
)

N = NULL
LETTERS = [[ord(letter) for letter in word] for word in ("ABCDEFG", "HIJKL", "XYZ")]
"""The documents of the worked example in the spec."""
WORKED = {"S": 8, "content_length": 4, "adaptive_k": False}


def multi(docs=LETTERS, **options):
    fixed = {"S": options.pop("S", 8), "pad_token_id": options.pop("pad_token_id", N)}
    return MultiSpliceDocumentDataset(doc_tokens_list=docs, **fixed, **options)


def triples_of(wanted):
    return [(number, t, s) for number, t, s, _ in wanted]


def test_pairs_of_three_small_documents_by_document():
    ds = multi(**WORKED, balance_mode="by_document")
    assert tuples(ds.triples()) == [
        (0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4),
        (1, 0, 4), (1, 1, 4), (1, 0, 4), (1, 1, 4),
    ]  # fmt: skip
    wanted = ["ABCD", "BCDE", "CDEF", "DEFG", "HIJK", "IJKL", "HIJK", "IJKL"]
    for i, letters in enumerate(wanted):
        tokens = [N, N, N, N, *(ord(letter) for letter in letters)]
        masks = [0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]
        check_example(ds[i], (tokens, *masks), (i // 4, i % 4 if i < 4 else i % 2, 4, 4), 8)


def test_pairs_of_three_small_documents_by_coverage():
    ds = multi(**WORKED)  # by_coverage is the default
    assert tuples(ds.triples()) == [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4), (1, 0, 4), (1, 1, 4)]
    assert len(ds) == 6


def test_adaptive_k_is_the_default_and_admits_short_documents():
    ds = multi(content_length=4)
    assert tuples(ds.triples()) == [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4), (1, 0, 4), (1, 1, 4), (2, 0, 5)]
    check_example(ds[6], ([N] * 5 + LETTERS[2], [0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 1]), (2, 0, 5, 3), 8)
    equal = multi(content_length=4, balance_mode="by_document")
    assert Counter(number for number, _, _ in tuples(equal.triples())) == {0: 4, 1: 4, 2: 4}
    # min_copy_len drops shorter spans
    assert {number for number, _, _ in tuples(multi(content_length=4, min_copy_len=4).triples())} == {0, 1}


@pytest.mark.parametrize(("adaptive", "counts"), [(True, [5905, 905, 1]), (False, [5905, 905])])
def test_counts_by_coverage_and_by_document(adaptive, counts):
    docs = documents([10_000, 5_000, 2_000])
    covered = multi(docs, S=4096, content_length=4096, adaptive_k=adaptive)
    assert len(covered) == sum(counts)
    assert np.bincount(covered.triples()[:, 0]).tolist() == counts
    equal = multi(docs, S=4096, content_length=4096, adaptive_k=adaptive, balance_mode="by_document")
    assert len(equal) == 5905 * len(counts)
    assert np.bincount(equal.triples()[:, 0]).tolist() == [5905] * len(counts)


def test_one_document_equals_the_single_dataset():
    for options in (
        {"content_start_mode": "slide_within", "content_length": 3, "offset_stride": 2},
        {"content_start_mode": "cyclic_roll", "offset_bound": "truncate"},
        {"content_length": 4},
    ):
        alone = SpliceDocumentDataset(S=6, doc_tokens=document(7), pad_token_id=N, **options)
        for balance in ("by_coverage", "by_document"):
            ds = multi([document(7)], S=6, balance_mode=balance, **options)
            assert ds.triples()[:, 1:].tolist() == alone.pairs().tolist()
            every = np.arange(len(alone))
            assert np.array_equal(ds.get_batch(every).tokens, alone.get_batch(every).tokens)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(schedule=schedules(), lengths=LENGTHS, balance=st.sampled_from(["by_coverage", "by_document"]))
def test_every_example_equals_the_naive_reference(schedule, lengths, balance):
    S, options = schedule
    docs = documents(lengths)
    spans_of = [spans(S=S, L=length, **options) for length in lengths]
    if not any(spans_of):
        with pytest.raises(ValueError):
            multi(docs, S=S, balance_mode=balance, **options)
        return
    wanted = {"by_coverage": by_coverage, "by_document": by_document}[balance](spans_of)
    ds = multi(docs, S=S, balance_mode=balance, **options)
    assert tuples(ds.triples()) == triples_of(wanted)
    check_dataset(ds, docs, wanted, S)


@given(schedule=schedules(), lengths=LENGTHS, tau=st.sampled_from([0.0, 0.5, 1.0]), size=st.integers(1, 60))
def test_quotas_select_evenly_spaced_examples(schedule, lengths, tau, size):
    S, options = schedule
    docs = documents(lengths)
    spans_of = [spans(S=S, L=length, **options) for length in lengths]
    if not any(spans_of):
        return
    ds = multi(docs, S=S, balance_mode="by_temperature", balance_tau=tau, epoch_length=size, **options)
    quotas = [int(quota) for quota in ds.quotas]
    assert sum(quotas) == size
    wanted = by_quota(spans_of, quotas)
    assert tuples(ds.triples()) == triples_of(wanted)
    check_dataset(ds, docs, wanted, S)


@pytest.mark.parametrize(
    "options",
    [
        {"balance_mode": "by_temperature", "balance_tau": 0.7, "alpha": 0.8, "offset_jitter": 2, "content_length": 3},
        {"sampler": "stream", "seed": 4, "doc_weights": [1, 2, 3], "content_length": 3},
        {"groups": ["a", "b", "a"], "jitter_mode": "low_discrepancy", "offset_jitter": 1, "curriculum": 2},
    ],
)
def test_pickled_dataset_is_identical(options):
    ds = multi(**options)
    other = pickle.loads(pickle.dumps(ds))
    assert len(other) == len(ds)
    for epoch in (0, 3):
        assert tuples(other.triples(epoch=epoch)) == tuples(ds.triples(epoch=epoch))
        mine, theirs = (one.get_batch(np.arange(len(ds)), epoch=epoch) for one in (ds, other))
        assert np.array_equal(mine.tokens, theirs.tokens)
        assert np.array_equal(mine.segment_ids, theirs.segment_ids)
    assert list(other.epoch(1, 2)) == list(ds.epoch(1, 2))
    assert other.plan(1, 5, 4).indices.tolist() == ds.plan(1, 5, 4).indices.tolist()


def test_accepted_types_of_documents_fillers_seeds_and_indices():
    ds = MultiSpliceDocumentDataset(
        S=4, doc_tokens_list=(doc for doc in (b"abc", bytearray(b"de"), range(5))), pad_token_id=-1, seed=None
    )
    assert ds[0].tokens.tolist() == [-1, 97, 98, 99]
    assert ds[1].tokens.tolist() == [-1, -1, 100, 101]
    assert ds.get_batch(iter([2, 3])).tokens.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    for seed in (-1, 2**70):
        jittered = MultiSpliceDocumentDataset(
            S=6, doc_tokens_list=[[1, 2, 3]], pad_token_id=0, seed=seed, offset_jitter=2, content_length=3
        )
        assert 1 <= jittered[0].origin.s <= 3
    with pytest.raises(ValueError, match=r"doc_weights.*\[1.0, -1.0\]"):
        MultiSpliceDocumentDataset(
            S=4, doc_tokens_list=[[1, 2]] * 2, pad_token_id=0, doc_weights=np.array([1, -1.0]), sampler="quota"
        )
    with pytest.raises(ValueError, match="-3"):
        MultiSpliceDocumentDataset(S=4, doc_tokens_list=[np.array([1, -3], dtype=np.int16)], pad_token_id=0)


@pytest.mark.parametrize("options", [{}, {"balance_mode": "by_document"}, {"sampler": "quota"}, {"content_stride": 3}])
def test_edge_weights_of_one_document_equal_the_single_dataset(options):
    """As many examples as there are starts, selected by quantiles."""
    doc = np.arange(30)
    many = MultiSpliceDocumentDataset(
        S=8, doc_tokens_list=[doc], pad_token_id=0, content_length=6, alpha=0.8, **options
    )
    stride = {name: value for name, value in options.items() if name == "content_stride"}
    one = SpliceDocumentDataset(S=8, doc_tokens=doc, pad_token_id=0, content_length=6, alpha=0.8, **stride)
    assert len(many) == len(one) == 24 // stride.get("content_stride", 1) + 1
    assert tuples(many.triples()) == tuples(one.triples())
    for invalid in ({"sampler": "enumerate"}, {"content_start_mode": "slide_within"}):
        with pytest.raises(ValueError, match="alpha"):
            MultiSpliceDocumentDataset(S=8, doc_tokens_list=[doc], pad_token_id=0, alpha=0.8, **invalid)


@pytest.mark.parametrize(("mode", "tau"), [("by_document", 0.0), ("by_coverage", 1.0)])
def test_alpha_with_the_older_balance_modes(mode, tau):
    """The specification's own example: quotas at tau 0 and tau 1."""
    docs = documents([40, 25, 11])
    options = {"content_length": 6, "alpha": 0.8}
    found = multi(docs, balance_mode=mode, **options)
    expected = multi(docs, balance_mode="by_temperature", balance_tau=tau, **options)
    assert found.quotas == expected.quotas and tuples(found.triples()) == tuples(expected.triples())
    assert max(found.quotas) - min(found.quotas) <= 1 or mode == "by_coverage"


@pytest.mark.parametrize("mode", ["coverage_balanced", "slide_within", "cyclic_roll", "anchor_start"])
def test_strides_per_document(mode):
    """Every document as if it were alone with its strides."""
    lengths, k_t, k_s = [11, 11, 7, 9], [1, 2, 3, 2], [2, 1, 1, 3]
    docs = documents(lengths)
    options = {"content_length": 4, "content_start_mode": mode}
    found = multi(docs, content_stride=k_t, offset_stride=tuple(k_s), **options)
    expected = []
    for number, doc in enumerate(docs):
        alone = multi([doc], content_stride=k_t[number], offset_stride=k_s[number], **options)
        expected += [(number, t, s) for _, t, s in tuples(alone.triples())]
    assert tuples(found.triples()) == expected


def test_alpha_per_document():
    docs = documents([40, 40, 25])
    options = {"content_length": 6, "balance_mode": "by_temperature", "balance_tau": 1.0}
    found = multi(docs, alpha=[0.0, 1.5, 0.4], content_stride=[1, 2, 1], **options)
    for number, (alpha, stride) in enumerate([(0.0, 1), (1.5, 2), (0.4, 1)]):
        alone = multi(docs, alpha=alpha or 1e-12, content_stride=stride, epoch_length=len(found), **options)
        mine, theirs = ([t for doc, t, _ in tuples(dataset.triples()) if doc == number] for dataset in (found, alone))
        assert mine == theirs


@pytest.mark.parametrize(
    "options", [{"alpha": [0.5]}, {"content_stride": [1, 0, 1]}, {"offset_stride": [1, 2]}, {"alpha": [0.1, -1, 0]}]
)
def test_options_per_document_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        multi(**options)
