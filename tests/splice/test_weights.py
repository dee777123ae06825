import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.splice.weights import distinct_pairs, first_spread, spread
from tests.splice import (
    NULL,
    by_quota,
    check_dataset,
    check_frequencies,
    check_quotas,
    documents,
    edge_weights,
    largest_remainder,
    quantiles,
    shares,
    spans,
    tuples,
)

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
LENGTH_WEIGHT_GROUP = st.tuples(st.integers(1, 60), st.sampled_from([0, 0.5, 1, 2, 3.25]), st.sampled_from("abc"))


def multi(lengths, S=8, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=documents(lengths), pad_token_id=NULL, **options)


def temperature(lengths, size, tau=1.0, **options):
    return multi(lengths, balance_mode="by_temperature", balance_tau=tau, epoch_length=size, **options)


def quotas(ds):
    return [int(quota) for quota in ds.quotas]


def counted(ds, lengths, epoch=0):
    """Number of examples of each document in an epoch."""
    return np.bincount(ds.triples(epoch=epoch)[:, 0], minlength=len(lengths)).tolist()


@pytest.mark.parametrize(
    ("lengths", "size", "tau", "wanted"),
    [
        ([10, 20, 30], 6, 1, [1, 2, 3]),
        ([10, 20, 30], 6, 0, [2, 2, 2]),
        ([10, 20, 30], 7, 0, [3, 2, 2]),  # a tie goes to the lower index
        ([10, 20, 30], 8, 0, [3, 3, 2]),
        ([30, 50], 4, 1, [2, 2]),  # 1.5 and 2.5
        ([50, 30], 4, 1, [3, 1]),
        ([10, 40, 10], 4, 1, [1, 3, 0]),  # 2/3, 8/3, 2/3: equal remainders, but floats may differ
        ([9, 16, 25], 12, 0.5, [3, 4, 5]),
        ([9, 16, 25], 1, 0.5, [0, 0, 1]),
        ([100, 10, 10], 3, 1, [3, 0, 0]),  # 2.5, 0.25, 0.25
    ],
)
def test_quotas_by_hand(lengths, size, tau, wanted):
    ds = temperature(lengths, size, tau)
    assert quotas(ds) == wanted
    assert len(ds) == size
    assert counted(ds, lengths) == wanted


@given(LENGTHS, st.integers(1, 200), st.sampled_from([0, 1]))
def test_ties_go_to_the_lower_index(lengths, size, tau):
    has = [length >= 2 for length in lengths]
    if any(has):
        assert quotas(temperature(lengths, size, float(tau))) == largest_remainder(shares(lengths, has, tau=tau), size)


def test_default_epoch_length_is_the_number_of_starts():
    # K = 4: 17, 7 and 1 starts
    ds = multi([20, 10, 3], balance_mode="by_temperature", balance_tau=0.5, content_length=4)
    assert len(ds) == 17 + 7 + 1
    check_quotas(quotas(ds), shares([20, 10, 3], [True] * 3, tau=0.5), 25)
    assert len(multi([20, 10, 3], sampler="stream", content_length=4)) == 25
    assert len(multi([20, 10, 3], sampler="quota", content_length=4, content_stride=2)) == 9 + 4 + 1


@given(
    documents_of=st.lists(LENGTH_WEIGHT_GROUP, min_size=1, max_size=8),
    size=st.integers(10**8, 2**62),
    tau=st.sampled_from([0, 0.3, 1]),
    weighted=st.booleans(),
    grouped=st.booleans(),
)
def test_quotas_of_long_epochs_are_exact(documents_of, size, tau, weighted, grouped):
    """Against fractions: floats have too few digits for the remainders."""
    lengths, weights, groups = (list(column) for column in zip(*documents_of, strict=True))
    has = [length >= 2 for length in lengths]
    if not any(has):
        return
    mass = [Fraction(float(length) ** tau) if ok else Fraction(0) for length, ok in zip(lengths, has, strict=True)]
    options = {}
    if weighted:
        weights = [weight or 0.25 for weight in weights]
        mass = [m * Fraction(weight) for m, weight in zip(mass, weights, strict=True)]
        options["doc_weights"] = weights
    if grouped:
        options["groups"] = groups
    label = groups if grouped else [""] * len(lengths)
    sums = {name: sum(m for m, group in zip(mass, label, strict=True) if group == name) for name in label}
    number = sum(total > 0 for total in sums.values())
    exact = [m / sums[group] / number if m else m for m, group in zip(mass, label, strict=True)]
    ds = temperature(lengths, size, tau, **options)
    assert quotas(ds) == largest_remainder(exact, size)
    assert len(ds) == sum(quotas(ds)) == size


def test_quotas_of_products_past_64_bits():
    """Against Python integers: a document of 4 billion spans, each once, and a quota beyond that."""
    options = {"content_length": 2, "content_start_mode": "slide_within", "balance_mode": "by_temperature"}
    documents = [np.broadcast_to(np.int32(1), (10**6,))]
    ds = MultiSpliceDocumentDataset(S=4096, doc_tokens_list=documents, pad_token_id=0, **options)
    n = 4095 * (10**6 - 1)
    assert len(ds) == n
    for j in (0, n // 3, n - 1):
        assert (ds[j].origin.t, ds[j].origin.s) == divmod(j, 4095)
    E = 10**15
    ds = MultiSpliceDocumentDataset(S=4096, doc_tokens_list=documents, pad_token_id=0, epoch_length=E, **options)
    for j in (0, E // 3, E - 1):
        assert (ds[j].origin.t, ds[j].origin.s) == divmod((2 * j + 1) * n // (2 * E), 4095)


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [("quota", [1e308, 1e308, 0.0]), ("stream", [5e-324, 5e-324, 0]), ("stream", [1.5e308, 1.5e308, 1e-308])],
)
def test_extreme_weights(sampler, weights):
    options = {"doc_weights": [1e308, 1e308, 1e-300], "groups": ["a", "a", "b"]}
    assert quotas(multi([20] * 3, epoch_length=400, **options)) == [100, 100, 200]
    assert 150 < counted(multi([20] * 3, epoch_length=400, sampler="stream", **options), [20] * 3)[2] < 250
    ds = multi([20, 20, 20], epoch_length=1000, sampler=sampler, doc_weights=weights)
    assert quotas(ds) == [500, 500, 0]
    assert abs(counted(ds, [20] * 3)[0] - 500) < (1 if sampler == "quota" else 100)
    assert counted(ds, [20] * 3)[2] == 0


@pytest.mark.parametrize(
    ("weights", "tau", "wanted"),
    [
        ([1.0, 0.5, 2.0], 0, [2, 1, 4]),
        ([1, 1, 1], 1, [4, 2, 1]),
        ([0, 1, 1], 0, [0, 4, 3]),
        ([0.0, 0.0, 0.25], 1, [0, 0, 7]),
        ([1, 2, 4], 1, [3, 2, 2]),  # 40, 40, 40: a tie
    ],
)
def test_weights_by_hand(weights, tau, wanted):
    lengths = [40, 20, 10]
    assert quotas(temperature(lengths, 7, tau, doc_weights=weights)) == wanted
    balance = {0: "by_document", 1: "by_coverage"}[tau]
    plain = multi(lengths, balance_mode=balance, epoch_length=7, doc_weights=np.array(weights))
    assert quotas(plain) == counted(plain, lengths) == wanted
    # weights also need quotas without an epoch length
    unsized = multi(lengths, balance_mode=balance, doc_weights=weights)
    assert len(unsized) == 33 + 13 + 3
    check_quotas(counted(unsized, lengths), shares(lengths, [True] * 3, tau=tau, weights=weights), 49)


@settings(max_examples=50)
@given(
    documents_of=st.lists(LENGTH_WEIGHT_GROUP, min_size=1, max_size=8),
    size=st.integers(1, 150),
    tau=st.sampled_from([0, 0.3, 0.7, 1]),
    grouped=st.booleans(),
)
def test_quotas_with_weights_and_groups(documents_of, size, tau, grouped):
    lengths, weights, groups = (list(column) for column in zip(*documents_of, strict=True))
    has = [length >= 3 for length in lengths]
    for group in set(groups) if grouped else {None}:
        # Every group with examples needs a positive weight; other cases are undefined.
        members = [i for i in range(len(lengths)) if has[i] and (group is None or groups[i] == group)]
        if members and not any(weights[i] for i in members):
            weights[members[0]] = 1
    if not any(has):
        return
    p = shares(lengths, has, tau=tau, weights=weights, groups=groups if grouped else None)
    assert sum(p) == 1
    extra = {"groups": groups} if grouped else {}
    ds = temperature(lengths, size, tau, doc_weights=weights, min_copy_len=3, **extra)
    check_quotas(quotas(ds), p, size)
    wanted = by_quota([spans(S=8, L=length, min_copy_len=3) for length in lengths], quotas(ds))
    check_dataset(ds, documents(lengths), wanted, 8)


def test_groups_have_equal_shares():
    lengths = [40, 20, 20, 10, 1]
    groups = ["web", "web", "book", "book", "empty"]
    ds = multi(lengths, groups=groups, epoch_length=36, balance_mode="by_coverage")
    assert quotas(ds) == [12, 6, 12, 6, 0]
    ds = multi(lengths, groups=groups, epoch_length=36, balance_mode="by_document")
    assert quotas(ds) == [9, 9, 9, 9, 0]
    metadata = [{"source": group, "n": i} for i, group in enumerate(groups)]
    by_key = multi(lengths, groups="source", doc_metadata=metadata, epoch_length=36, balance_mode="by_coverage")
    assert quotas(by_key) == [12, 6, 12, 6, 0]
    unsized = multi(lengths, groups=groups)
    assert len(unsized) == 33 + 13 + 13 + 3
    check_quotas(counted(unsized, lengths), [Fraction(1, 3), Fraction(1, 6), Fraction(1, 3), Fraction(1, 6), 0], 62)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_number_of_weights_and_groups_must_match_the_documents(number):
    for options in ({"doc_weights": [1] * number}, {"groups": ["a"] * number}):
        with pytest.raises(ValueError, match=rf"(?s)(?=.*\b{number}\b)(?=.*\b3\b)"):
            multi([5, 6, 7], **options)


@pytest.mark.parametrize("weights", [[1, -0.5, 2], [1, math.nan, 2], [1, math.inf, 2], [0, 0, 0], ["1", "2", "3"]])
def test_invalid_weights_raise(weights):
    with pytest.raises(ValueError, match="weight"):
        multi([5, 6, 7], doc_weights=weights)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    K=st.integers(2, 10),
    stride=st.integers(1, 3),
    alpha=st.floats(0.1, 3) | st.floats(3, 40),
    tau=st.sampled_from([0.0, 0.7, 1.0]),
    size=st.integers(1, 120),
)
def test_starts_are_quantiles_of_the_edge_weights(lengths, K, stride, alpha, tau, size):
    if max(lengths) < 2:
        return
    ds = temperature(lengths, size, tau, content_length=K, content_stride=stride, alpha=alpha)
    per_document = quotas(ds)
    check_quotas(per_document, shares(lengths, [length >= 2 for length in lengths], tau=tau), size)
    triples = tuples(ds.triples())
    assert [number for number, _, _ in triples] == [i for i, quota in enumerate(per_document) for _ in range(quota)]
    for number, length in enumerate(lengths):
        k = min(K, 8, length)
        starts = list(range(0, length - k + 1, stride))
        mine = [(t, s) for i, t, s in triples if i == number]
        if not mine:
            continue
        weights = edge_weights(starts, L=length, K=k, alpha=alpha)
        for (t, s), allowed in zip(mine, quantiles(weights, len(mine)), strict=True):
            assert s == 8 - k
            assert t in {starts[i] for i in allowed}
    check_dataset(ds, documents(lengths), [(i, t, s, 8 - s) for i, t, s in triples], 8)


@pytest.mark.parametrize(("L", "K", "alpha"), [(900, 64, 0.8), (900, 440, 2.0), (901, 450, 0.3), (700, 5, 1.5)])
def test_edge_weights_of_longer_documents(L, K, alpha):
    starts = temperature([L], L - K + 1, S=512, content_length=K, alpha=alpha).triples()[:, 1].tolist()
    allowed = quantiles(edge_weights(range(L - K + 1), L=L, K=K, alpha=alpha), L - K + 1)
    assert all(start in possible for start, possible in zip(starts, allowed, strict=True))


def test_stream_depends_on_seed_and_epoch():
    def stream(seed, epoch=0):
        return tuples(multi([9, 14, 20], sampler="stream", epoch_length=60, content_length=4, seed=seed).triples(epoch))

    assert stream(1) == stream(1)
    assert stream(1, 5) == stream(1, 5)
    assert len({tuple(stream(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    assert stream(1, 2) != stream(2, 1)


def test_single_rows_of_a_stream_equal_the_batch():
    ds = multi([9, 14, 20], sampler="stream", epoch_length=60, content_length=4, seed=3, offset_jitter=2)
    for epoch in (0, 1, 7):
        triples = tuples(ds.triples(epoch=epoch))
        check_dataset(ds, documents([9, 14, 20]), [(*triple, 4) for triple in triples], 8, epoch=epoch)
        one = ds.get_batch([41], epoch=epoch).origin
        assert (one.doc_idx[0], one.t[0], one.s[0]) == triples[41]


def test_longer_stream_starts_like_a_shorter_one():
    short, long = (multi([9, 14], sampler="stream", epoch_length=n, content_length=4, seed=3) for n in (50, 500))
    assert tuples(long.triples())[:50] == tuples(short.triples())


@pytest.mark.parametrize(
    ("options", "tau"),
    [
        ({"balance_mode": "by_document"}, 0),
        ({"balance_mode": "by_temperature", "balance_tau": 0.5, "doc_weights": [1, 0, 3, 1, 0.5]}, 0.5),
        ({"balance_mode": "by_coverage", "groups": ["a", "a", "b", "c", "a"]}, 1),
    ],
)
def test_stream_documents_follow_their_shares(options, tau):
    lengths = [9, 14, 20, 1, 60]
    ds = multi(lengths, sampler="stream", epoch_length=20_000, content_length=4, seed=11, **options)
    has = [length >= 2 for length in lengths]
    p = shares(lengths, has, tau=tau, weights=options.get("doc_weights"), groups=options.get("groups"))
    for epoch in (0, 1):
        drawn = ds.triples(epoch=epoch)[:, 0].tolist()
        check_frequencies(drawn, {i: share for i, share in enumerate(p) if share})


@pytest.mark.parametrize(("alpha", "stride"), [(0.0, 3), (0.8, 1), (2.0, 2)])
def test_stream_starts_follow_the_edge_weights(alpha, stride):
    lengths = [12, 30]
    ds = multi(
        lengths, sampler="stream", epoch_length=30_000, content_length=6, content_stride=stride, alpha=alpha, seed=2
    )
    expected = {}
    for number, (length, p) in enumerate(zip(lengths, shares(lengths, [True, True], tau=1), strict=True)):
        starts = list(range(0, length - 6 + 1, stride))
        weights = edge_weights(starts, L=length, K=6, alpha=alpha)
        total = math.fsum(weights)
        for start, weight in zip(starts, weights, strict=True):
            expected[number, start, 2] = float(p) * weight / total
    check_frequencies(tuples(ds.triples()), expected)


def test_stream_neighbors_are_independent():
    ds = multi([9, 9], sampler="stream", epoch_length=20_001, content_length=8, seed=2)
    drawn = [(number, t) for number, t, _ in tuples(ds.triples())]
    values = [(number, t) for number in range(2) for t in range(2)]
    check_frequencies(itertools.pairwise(drawn), {(a, b): 1 / 16 for a in values for b in values})


@pytest.mark.parametrize("mode", ["anchor_start", "slide_within", "cyclic_roll"])
def test_stream_draws_from_all_pairs_of_a_content_mode(mode):
    lengths = [5, 7, 9]
    ds = multi(lengths, sampler="stream", epoch_length=3000, content_start_mode=mode, content_length=4, seed=8)
    possible = {
        (number, t, s, length)
        for number, L in enumerate(lengths)
        for t, s, length in spans(S=8, L=L, content_start_mode=mode, content_length=4)
    }
    batch = ds.get_batch(np.arange(3000))
    drawn = set(zip(*(getattr(batch.origin, name).tolist() for name in ("doc_idx", "t", "s", "length")), strict=True))
    assert drawn == possible


def test_distinct_pairs_are_those_of_numpy():
    rng = np.random.default_rng(3)
    for n in (0, 1, 50):
        first, second = rng.integers(1, 4, n), rng.integers(0, 3, n) / 4
        pairs, which = distinct_pairs(first, second)
        wanted, at = np.unique(np.stack((first, second)), axis=1, return_inverse=True)
        assert pairs == [tuple(column) for column in wanted.T.tolist()]
        assert which.tolist() == at.reshape(-1).tolist()


@pytest.mark.parametrize(("count", "quota"), [(1, 1), (7, 3), (3, 7), (50, 50), (41, 1), (10**6 + 3, 10**6 - 1)])
def test_first_spread_is_where_the_examples_of_a_span_begin(count, quota):
    j = np.arange(quota)
    numbers = spread(j, np.full(quota, count), np.full(quota, quota))
    asked = np.unique(np.append(np.arange(0, count, max(count // 100, 1)), count - 1))
    assert first_spread(asked, count, quota).tolist() == np.searchsorted(numbers, asked).tolist()


@pytest.mark.parametrize(("count", "quota"), [(8606827218, 8606820001), (2**49 + 1, 2**49 - 3), (2**55 + 1, 2**55 - 3)])
def test_first_spread_is_exact_for_products_past_64_bits(count, quota):
    asked = np.array([0, 1, count // 3, count // 2, count - 2, count - 1])
    exact = [max(-((count - 2 * quota * number) // (2 * count)), 0) for number in asked.tolist()]
    assert first_spread(asked, count, quota).tolist() == exact
