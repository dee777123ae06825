"""Shuffling one axis: against the rows of the enumeration, taken apart by a naive loop."""

import itertools
import tracemalloc

import numpy as np
import pytest

from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from niels_gpt.splice import axis_order as axis_order_module
from niels_gpt.splice import base as base_module
from niels_gpt.splice.documents import ArrayDocuments

LENGTHS = (9, 5, 12, 2)
LAYOUTS = [
    {"content_start_mode": "slide_within"},
    {"content_start_mode": "slide_within", "content_stride": 2, "offset_stride": 3},
    {"content_start_mode": "slide_within", "offset_bound": "truncate"},
    {"content_start_mode": "anchor_start"},
    {"content_start_mode": "cyclic_roll"},
    {"content_start_mode": "coverage_balanced"},
    {"content_start_mode": "slide_within", "balance_mode": "by_document"},
    {"content_start_mode": "anchor_start", "balance_mode": "by_document"},
    {"content_start_mode": "cyclic_roll", "balance_mode": "by_document"},
    {"content_start_mode": "slide_within", "balance_mode": "by_temperature", "balance_tau": 0.3},
    {"content_start_mode": "cyclic_roll", "balance_mode": "by_temperature", "epoch_length": 57},
    {"content_start_mode": "coverage_balanced", "balance_mode": "by_document", "alpha": 0.8},
    {"content_start_mode": "slide_within", "content_stride": [1, 2, 3, 1], "offset_stride": [2, 1, 1, 1]},
]


def multi(**options):
    docs = [np.arange(length) for length in LENGTHS]
    return MultiSpliceDocumentDataset(S=8, doc_tokens_list=docs, pad_token_id=0, content_length=4, **options)


def rows_of(triples):
    """Consecutive examples of one document and start, as lists of offsets: [(document, t), [s, ...]]."""
    groups = itertools.groupby(triples.tolist(), key=lambda triple: tuple(triple[:2]))
    return [(key, [s for _, _, s in group]) for key, group in groups]


def shuffled(dataset, epoch=0, seed=7):
    indices = np.array(list(dataset.epoch(seed, epoch)))
    assert sorted(indices.tolist()) == list(range(len(dataset)))  # coverage is unchanged
    return dataset.triples()[indices]


@pytest.mark.parametrize("options", LAYOUTS)
def test_offsets_alone(options):
    """The starts stay in order; every start has its own offsets, in another order."""
    dataset = multi(shuffle_offsets=True, **options)
    plain = multi(**options).triples()
    found = shuffled(dataset)
    assert found[:, :2].tolist() == plain[:, :2].tolist()
    assert [(key, sorted(offsets)) for key, offsets in rows_of(found)] == [
        (key, sorted(offsets)) for key, offsets in rows_of(plain)
    ]


@pytest.mark.parametrize("options", LAYOUTS)
def test_content_alone(options):
    """Within a document the rows change places; the offsets of a row stay in order."""
    dataset = multi(shuffle_content=True, **options)
    found, plain = rows_of(shuffled(dataset)), rows_of(multi(**options).triples())

    assert [doc for (doc, _), _ in found] == sorted(doc for (doc, _), _ in found)
    pairs = [sorted((key, s) for key, offsets in rows for s in offsets) for rows in (found, plain)]
    assert pairs[0] == pairs[1]
    if options.get("balance_mode") != "by_document":  # there, equal rows may come to stand side by side
        assert sorted(found) == sorted(plain)


@pytest.mark.parametrize("options", LAYOUTS)
def test_both_axes(options):
    dataset = multi(shuffle_offsets=True, shuffle_content=True, **options)
    found, plain = shuffled(dataset), multi(**options).triples()
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, plain.tolist()))
    assert found[:, 0].tolist() == plain[:, 0].tolist()


def test_the_order_changes_with_seed_and_epoch():
    dataset = multi(shuffle_offsets=True, shuffle_content=True, content_start_mode="cyclic_roll")
    orders = {tuple(dataset.epoch(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    once = multi(shuffle_offsets=True, content_start_mode="cyclic_roll", shuffle_per_epoch=False)
    assert list(once.epoch(1, 0)) == list(once.epoch(1, 5)) != list(once.epoch(2, 0))


@pytest.mark.parametrize("axis", ["offset", "content"])
def test_an_integer_is_the_seed(axis):
    """Its own seed makes an axis independent of the seed of the run."""
    name, seed_name = {"offset": "shuffle_offsets", "content": "shuffle_content"}[axis], f"{axis}_seed"
    mode = {"content_start_mode": "cyclic_roll"}
    by_number, by_seed = multi(**{name: 5}, **mode), multi(**{name: True, seed_name: 5}, **mode)
    assert list(by_number.epoch(0, 1)) == list(by_seed.epoch(9, 1))
    assert list(by_number.epoch(0, 1)) != list(multi(**{name: 6}, **mode).epoch(0, 1))
    assert list(multi(**{name: 0}, **mode).epoch(3, 0)) != list(range(len(by_number)))


def test_an_axis_shuffle_replaces_the_shuffle_of_the_epoch():
    mode = {"content_start_mode": "slide_within"}
    off, on = (multi(shuffle=shuffle, shuffle_offsets=True, **mode) for shuffle in (False, True))
    assert list(off.epoch(3, 0)) == list(on.epoch(3, 0))
    assert list(multi(shuffle=False, **mode).epoch(3, 0)) == list(range(len(off)))


def test_plan_and_ranks_follow_the_order():
    dataset = multi(shuffle_content=True, content_start_mode="slide_within")
    expected = list(dataset.epoch(4, 0)) + list(dataset.epoch(4, 1))
    B = 16
    steps = 2 * len(dataset) // B
    found = [index for step in range(steps) for index in dataset.plan(4, step, B).indices.tolist()]
    assert found == expected[: steps * B]
    ranks = [list(dataset.epoch(4, 0, rank, 3)) for rank in range(3)]
    assert [index for three in itertools.zip_longest(*ranks) for index in three if index is not None] == expected[
        : len(dataset)
    ]


def test_a_curriculum_orders_each_stage():
    dataset = multi(shuffle_content=True, content_start_mode="slide_within", curriculum=3)
    for step in range(12):
        plan = dataset.plan(0, step, 4)
        assert set(dataset.planned(plan).doc.tolist()) <= set(range(plan.documents))


def test_any_position_of_a_long_document_is_quick():
    """Rows of one width need no table: a document of a hundred million tokens."""
    document = np.zeros(100_000_000, dtype=np.uint8)
    dataset = SpliceDocumentDataset(
        S=1024, doc_tokens=document, pad_token_id=0, content_length=512, content_start_mode="cyclic_roll",
        shuffle_content=True, shuffle_offsets=True,
    )  # fmt: skip
    spans = dataset.planned(dataset.plan(0, 1_000_000, 8))
    assert len(set(spans.t.tolist())) == 1 and len(set(spans.s.tolist())) == 8  # eight offsets of one start


def test_the_table_of_one_seed_is_not_used_for_another():
    """slide_within with tight offsets: rows of different widths."""
    used, fresh = (multi(shuffle_content=True, content_start_mode="slide_within") for _ in range(2))
    orders = [list(used.epoch(seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9
    assert orders[-1] == list(fresh.epoch(2, 2))


@pytest.mark.parametrize("options", LAYOUTS)
def test_row_begins(options):
    """Against the starts of every example, enumerated."""
    dataset = multi(shuffle_content=True, **options)
    if not hasattr(dataset, "_starts"):
        return  # rows of one width
    t = dataset.triples()
    for at, doc in enumerate(np.unique(t[:, 0]).tolist()):
        starts = t[t[:, 0] == doc, 1]
        begins = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1])))
        assert dataset._row_begins(at).tolist() == begins.tolist()


def test_a_table_has_an_entry_per_start_not_per_example():
    """400 million examples of half a million starts: 30 MB at most, and no example is enumerated."""
    dataset = SpliceDocumentDataset(
        S=1024, doc_tokens=np.zeros(500_000, dtype=np.uint8), pad_token_id=0, content_length=256, shuffle_content=True,
        content_start_mode="slide_within", shuffle_offsets=True,
    )  # fmt: skip
    assert len(dataset) > 1 << 28
    tracemalloc.start()
    spans = [dataset.planned(dataset.plan(0, step, 8)) for step in (0, 1_000_000, len(dataset) // 8)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    for span in spans[:2]:
        assert len(set(span.t.tolist())) == 1 and len(set(span.s.tolist())) == 8


def test_all_tables_together_are_bounded(monkeypatch):
    monkeypatch.setattr(axis_order_module, "MAX_ROWS", 40)
    dataset = multi(shuffle_content=True, content_start_mode="slide_within", balance_mode="by_document")
    for epoch in range(5):
        assert sorted(dataset.epoch(0, epoch)) == list(range(len(dataset)))
        assert 0 < sum(map(len, dataset._axis_order._tables.values())) <= 40


@pytest.mark.parametrize(
    "options",
    [{}, {"balance_mode": "by_temperature", "balance_tau": 0.0}, {"curriculum": 2}, {"shuffle_offsets": True}],
)
def test_too_many_starts_are_refused_before_the_first_step(monkeypatch, options):
    """The message names the document by its index in its source."""
    monkeypatch.setattr(base_module, "MAX_ROWS", 9)
    docs = ArrayDocuments([np.arange(length) for length in LENGTHS], indices=[31, 32, 33, 34])
    given = {"S": 8, "doc_tokens_list": (), "documents": docs, "pad_token_id": 0, "content_length": 4}
    given |= {"content_start_mode": "slide_within", "shuffle_content": True} | options
    with pytest.raises(ValueError, match=r"shuffle_content.* document 33 has 11, more than 9"):
        MultiSpliceDocumentDataset(**given)
    MultiSpliceDocumentDataset(**given | {"content_stride": 3})
    MultiSpliceDocumentDataset(**given | {"content_start_mode": "anchor_start"})
