import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from tests.splice import NULL, check_dataset, check_frequencies, document, documents, origins, tuples


def single(L=20, S=8, **options):
    return SpliceDocumentDataset(S=S, doc_tokens=document(L), pad_token_id=NULL, **options)


def multi(lengths=(9, 14, 20), S=8, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=documents(lengths), pad_token_id=NULL, **options)


def examples(n):
    """A dataset of n examples."""
    return single(L=n + 1, content_length=2)


@given(n=st.integers(1, 300), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6), world=st.integers(1, 12))
def test_ranks_partition_a_permutation(n, seed, epoch, world):
    ds = examples(n)
    assert len(ds) == n
    full = [int(i) for i in ds.epoch(seed, epoch)]
    assert sorted(full) == list(range(n))
    by_rank = [[int(i) for i in ds.epoch(seed, epoch, rank=rank, world_size=world)] for rank in range(world)]
    assert by_rank == [full[rank::world] for rank in range(world)]


def test_order_depends_only_on_seed_and_epoch():
    orders = {(seed, epoch): list(examples(50).epoch(seed, epoch)) for seed in range(6) for epoch in range(6)}
    assert len({tuple(order) for order in orders.values()}) == 36
    ds = examples(50)
    list(ds.epoch(3, 3))
    assert list(ds.epoch(2, 4)) == orders[2, 4] == list(ds.epoch(seed=2, epoch=4, rank=0, world_size=1))


def test_order_is_well_mixed():
    order = np.array(list(examples(5000).epoch(0, 0)))  # more than one block of 4096
    assert sorted(order.tolist()) == list(range(5000))
    assert np.sum(np.diff(order) == 1) < 20
    assert np.sum(order == np.arange(5000)) < 20
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.1
    assert len(set(np.diff(order).tolist())) > 2000


def test_order_of_a_billion_examples_is_lazy():
    ds = single(L=40_000, S=40_000, content_length=2, content_start_mode="slide_within")
    first = [int(i) for i in itertools.islice(ds.epoch(0, 0), 2000)]
    assert len(set(first)) == 2000
    assert all(0 <= i < len(ds) for i in first)
    assert max(first) > 0.9 * len(ds)
    assert min(first) < 0.1 * len(ds)
    by_rank = [[int(i) for i in itertools.islice(ds.epoch(0, 0, rank, 3), 20)] for rank in range(3)]
    assert [part[k] for k in range(20) for part in by_rank] == first[:60]


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (5, 3), (1, 1), (0, 0), (0, -1)])
def test_rank_outside_the_world_raises(rank, world):
    with pytest.raises(ValueError, match=str(world)):
        next(iter(examples(10).epoch(0, 0, rank=rank, world_size=world)))


def test_global_generators_are_unchanged(random_states):
    before = random_states()
    ds = multi(content_length=4, sampler="stream", offset_jitter=3)
    list(ds.epoch(0, 0))
    ds.gather(ds.plan(0, 3, 8))
    multi(content_length=4, balance_mode="by_temperature", alpha=0.8, offset_jitter=2).triples()
    assert random_states() == before


JITTER_MODES = ("uniform", "low_discrepancy")


@given(
    S=st.integers(2, 12),
    lengths=st.lists(st.integers(2, 14), min_size=1, max_size=4),
    K=st.integers(2, 12),
    J=st.integers(0, 14),
    mode=st.sampled_from(JITTER_MODES),
    epoch=st.integers(0, 1000),
)
def test_jitter_moves_spans_left_within_the_frame(S, lengths, K, J, mode, epoch):
    options = {"content_length": K, "seed": 1}
    plain = tuples(multi(lengths, S, **options).triples())
    ds = multi(lengths, S, offset_jitter=J, jitter_mode=mode, **options)
    moved = tuples(ds.triples(epoch=epoch))
    wanted = []
    for (number, t, s), (number_now, t_now, s_now) in zip(plain, moved, strict=True):
        k = min(K, S, lengths[number])
        assert (number_now, t_now) == (number, t)
        assert s == S - k
        assert s - min(J, S - k) <= s_now <= s
        wanted.append((number, t, s_now, k))
    check_dataset(ds, documents(lengths), wanted, S, epoch=epoch)


@pytest.mark.parametrize("mode", JITTER_MODES)
def test_jitter_is_reproducible_and_changes_with_seed_and_epoch(mode):
    def triples(seed, epoch):
        ds = multi([60, 40], 16, content_length=6, offset_jitter=3, jitter_mode=mode, seed=seed)
        return tuple(tuples(ds.triples(epoch=epoch)))

    assert triples(3, 2) == triples(3, 2)
    assert len({triples(0, epoch) for epoch in range(4)}) > 1
    if mode == "uniform":
        assert len({triples(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize("mode", JITTER_MODES)
def test_every_start_gets_every_offset_over_the_epochs(mode):
    ds = single(14, 16, content_length=5, offset_jitter=3, jitter_mode=mode, seed=4)
    seen = {(t, s) for epoch in range(64) for t, s in tuples(ds.pairs(epoch=epoch))}
    assert seen == set(itertools.product(range(10), range(8, 12)))


@pytest.mark.parametrize("J", [1, 6])
def test_jitter_is_spread_evenly(J):
    """Low discrepancy: balanced in every prefix. Uniform: offsets, neighbors and epochs are independent."""
    options = {"content_length": 4, "offset_jitter": J, "seed": 3}
    one = single(1003, 16, jitter_mode="low_discrepancy", **options)
    many = multi([300, 400, 309], 16, jitter_mode="low_discrepancy", **options)
    for offsets in (one.pairs(epoch=2)[:, 1], many.triples(epoch=3)[:, 2]):
        assert len(offsets) == 1000
        counts = dict.fromkeys(range(12 - J, 13), 0)
        for offset in offsets.tolist():
            counts[offset] += 1
            assert max(counts.values()) - min(counts.values()) <= 3
    ds = single(6003, 16, jitter_mode="uniform", **options)
    offsets, later = (ds.pairs(epoch=epoch)[:, 1].tolist() for epoch in (0, 1))
    for drawn in (itertools.pairwise(offsets), zip(offsets, later, strict=True)):
        every = itertools.product(range(12 - J, 13), repeat=2)
        check_frequencies(drawn, dict.fromkeys(every, 1 / (J + 1) ** 2))


@pytest.mark.parametrize(
    "options",
    [{"balance_mode": "by_temperature", "alpha": 0.8, "balance_tau": 0.7}, {"content_start_mode": "slide_within"}],
)
def test_epochs_without_jitter_are_identical(options):
    ds = multi(content_length=4, **options)
    first = ds.get_batch(np.arange(len(ds)))
    assert tuples(ds.triples(epoch=0)) == tuples(ds.triples(epoch=1)) == tuples(ds.triples(epoch=99))
    assert np.array_equal(ds.get_batch(np.arange(len(ds)), epoch=7).tokens, first.tokens)


KINDS = [
    lambda: multi(content_length=4),
    lambda: multi(content_length=4, sampler="stream", seed=6, offset_jitter=3),
    lambda: multi(content_length=4, balance_mode="by_temperature", balance_tau=0.5, offset_jitter=2),
    lambda: multi(content_length=4, balance_mode="by_document", curriculum=3),
    lambda: single(20, 8, content_length=4, offset_jitter=2),
]


@pytest.mark.parametrize(("make", "world"), [*zip(KINDS, (2, 5, 9, 3, 2), strict=True)])
def test_ranks_gather_their_rows_of_a_step(make, world):
    ds = make()
    for step in (0, 1, 9, 50):
        plan = ds.plan(3, step, 7)
        assert len(plan.indices) == len(plan.epochs) == 7
        batch = ds.gather(plan)
        for row, (index, epoch) in enumerate(zip(plan.indices.tolist(), plan.epochs.tolist(), strict=True)):
            alone = ds.get_batch([index], epoch=epoch)
            assert origins(alone) == [origins(batch)[row]]
            for field in ("tokens", "loss_mask", "segment_ids"):
                assert np.array_equal(getattr(batch, field)[row], getattr(alone, field)[0])
        for rank in range(world):
            mine = make().plan(3, step, 7, rank=rank, world_size=world)
            assert mine.indices.tolist() == plan.indices.tolist()[rank::world]
            assert mine.epochs.tolist() == plan.epochs.tolist()[rank::world]
            assert ds.gather(mine).tokens.tolist() == batch.tokens.tolist()[rank::world]


@pytest.mark.parametrize(("make", "B"), [(KINDS[0], 1), (KINDS[1], 7), (KINDS[4], 100)])
def test_steps_iterate_over_consecutive_epochs(make, B):
    ds = make()
    expected = [(int(i), epoch) for epoch in range(4) for i in ds.epoch(5, epoch)]
    steps = len(expected) // B
    plans = [ds.plan(5, step, B) for step in range(steps)]
    found = [pair for plan in plans for pair in zip(plan.indices.tolist(), plan.epochs.tolist(), strict=True)]
    assert found == expected[: steps * B]


def test_step_of_a_huge_dataset():
    ds = single(L=40_000, S=40_000, content_length=2, content_start_mode="slide_within")
    n, B = len(ds), 4
    step = n // B  # n = 4 * step + 1
    plan = ds.plan(0, step, B)
    assert plan.epochs.tolist() == [0, 1, 1, 1]
    assert plan.indices.tolist()[1:] == [int(i) for i in itertools.islice(ds.epoch(0, 1), 3)]
    assert all(0 <= i < n for i in plan.indices.tolist())


def test_documents_join_one_by_one():
    ds = multi([9, 14, 20, 11], curriculum=3)
    assert [ds.stage(step) for step in range(14)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4]
    assert ds.stage(10**9) == 4
    assert multi([9, 14, 3], content_length=4, adaptive_k=False, curriculum=1).stage(50) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"balance_mode": "by_temperature", "balance_tau": 0.7, "alpha": 0.8, "offset_jitter": 2},
        {"balance_mode": "by_document", "epoch_length": 40},
        {"sampler": "stream", "epoch_length": 60},
        {"content_start_mode": "slide_within"},
    ],
)
def test_batches_contain_only_joined_documents(options):
    ds = multi([9, 14, 20, 11], curriculum=4, content_length=4, **options)
    for step in range(30):
        used = set(ds.gather(ds.plan(2, step, 12)).origin.doc_idx.tolist())
        assert max(used) < ds.stage(step) == min(4, 1 + step // 4)
    later = {i for step in range(12, 40) for i in ds.gather(ds.plan(2, step, 12)).origin.doc_idx.tolist()}
    assert later == {0, 1, 2, 3}


def test_curriculum_of_zero_steps_raises():
    with pytest.raises(ValueError, match="curriculum"):
        multi(curriculum=0)
