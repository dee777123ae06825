"""The datasets hold the spans, order and arrays of the core, in examples as Levanter itself builds them."""

import asyncio

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data.text.examples import GrugLmExample
from levanter.models.lm_model import LmExample

from niels_gpt import splice
from niels_gpt.levanter import MultiSpliceDocumentDataset, SpliceDocumentDataset
from niels_gpt.levanter.datasets import seed_of
from niels_gpt.levanter.examples import grug_builder
from tests.levanter import arrays, take

POS = hax.Axis("position", 16)
DOCUMENTS = [np.arange(n, dtype=np.int32) + 100 * i + 1 for i, n in enumerate((40, 23, 9))]
MULTI = {"doc_tokens_list": DOCUMENTS, "pad_token_id": 0, "content_length": 8}


def test_the_worked_example_of_the_specification():
    dataset = SpliceDocumentDataset(
        Pos=hax.Axis("position", 5),
        doc_tokens=[0, 1, 2, 3, 4],
        pad_token_id=9,
        content_length=3,
        content_start_mode="slide_within",
    )
    assert dataset.is_finite() and asyncio.run(dataset.async_len()) == 13
    tokens, weights, segments = arrays(take(dataset, [0, 1, 12]))
    assert tokens.tolist() == [[0, 1, 2, 9, 9], [9, 0, 1, 2, 9], [9, 9, 9, 3, 4]]
    assert weights.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert segments.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_examples_are_those_that_levanters_constructor_builds():
    example = take(MultiSpliceDocumentDataset(Pos=POS, **MULTI), [5])[0]
    segments = hax.named(np.asarray(example.attn_mask.segment_ids[0].array), POS)
    built = LmExample.causal(
        hax.named(np.asarray(example.tokens.array), POS), loss_weight=example.loss_weight, segment_ids=segments
    )
    assert jax.tree.structure(example) == jax.tree.structure(built)
    for ours, theirs in zip(jax.tree.leaves(example), jax.tree.leaves(built), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_components_yield_plain_arrays():
    named = take(MultiSpliceDocumentDataset(Pos=POS, **MULTI), [5])[0]
    plain = take(MultiSpliceDocumentDataset(Pos=POS, builder=grug_builder, **MULTI), [5])[0]
    assert isinstance(plain, GrugLmExample)
    built = GrugLmExample.causal(
        jax.numpy.asarray(plain.tokens), segment_ids=jax.numpy.asarray(plain.attn_mask.segment_ids[0])
    )
    assert jax.tree.structure(plain) == jax.tree.structure(built)
    np.testing.assert_array_equal(plain.tokens, named.tokens.array)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"balance_mode": "by_document"},
        {"balance_mode": "by_temperature", "balance_tau": 0.5, "alpha": 0.8, "offset_jitter": 2},
        {"sampler": "stream", "epoch_length": 50},
        {"curriculum": 2},
        {"content_start_mode": "cyclic_roll", "offset_stride": 3},
        {"content_start_mode": "slide_within", "shuffle_content": True, "eos_before_span": True, "eos_token_id": 99},
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_positions_hold_what_the_torch_loop_trains_on(options):
    seed, B = 7, 6
    core = splice.MultiSpliceDocumentDataset(S=16, seed=seed, **MULTI | options)
    dataset = MultiSpliceDocumentDataset(
        Pos=POS,
        rng_key=jax.random.PRNGKey(seed),
        shuffle=True,
        epochs=None,
        batch_size=B,
        **MULTI | options,
    )
    for step in (0, 1, 2, 3, 5, len(core) // B, 3 * len(core) // B + 1):
        frames = core.gather(core.plan(seed, step, B))
        tokens, weights, segments = arrays(take(dataset, range(step * B, (step + 1) * B)))
        np.testing.assert_array_equal(tokens, frames.tokens)
        np.testing.assert_array_equal(weights, frames.loss_mask)
        np.testing.assert_array_equal(segments, frames.segment_ids)
    # A loader asks for the rows of several steps at once, in any order.
    positions = np.random.default_rng(0).permutation(4 * B)
    together = arrays(take(dataset, positions))
    for row, position in enumerate(positions.tolist()):
        frames = core.gather(core.plan(seed, position // B, B))
        np.testing.assert_array_equal(together[0][row], frames.tokens[position % B])


def test_epochs_end_a_dataset_and_each_has_every_example():
    dataset = MultiSpliceDocumentDataset(Pos=POS, shuffle=True, epochs=2, rng_key=jax.random.PRNGKey(1), **MULTI)
    n = len(dataset.core)
    assert asyncio.run(dataset.async_len()) == 2 * n
    tokens = arrays(take(dataset, range(2 * n)))[0].tolist()
    assert tokens[:n] != tokens[n:] and sorted(tokens[:n]) == sorted(tokens[n:])
    with pytest.raises(IndexError, match=f"0..{2 * n - 1}"):
        take(dataset, [2 * n])
    with pytest.raises(IndexError):
        take(dataset, [-1])
    assert take(dataset, []) == []


def test_a_dataset_without_end_has_no_length():
    dataset = MultiSpliceDocumentDataset(Pos=POS, epochs=None, **MULTI)
    assert not dataset.is_finite()
    with pytest.raises(ValueError, match="no end"):
        asyncio.run(dataset.async_len())


def test_levanters_shuffle_is_ours_seeded_by_its_key():
    dataset = MultiSpliceDocumentDataset(Pos=POS, epochs=None, **MULTI)
    shuffled = dataset.shuffle(jax.random.PRNGKey(5))
    in_blocks = dataset.block_shuffle(io_block_size=4, window_blocks=2, key=jax.random.PRNGKey(5))
    indices, epochs = dataset.core.order(5, np.arange(80), shuffle=True)
    expected = dataset.core.get_batch(indices, epochs).tokens
    for each in (shuffled, in_blocks):
        np.testing.assert_array_equal(arrays(take(each, range(80)))[0], expected)
    assert not np.array_equal(arrays(take(dataset, range(80)))[0], expected)


def test_seeds_are_those_of_the_keys():
    assert seed_of(jax.random.PRNGKey(7)) == seed_of(jax.random.key(7)) == 7
    assert seed_of(jax.random.split(jax.random.PRNGKey(7))[0]) > 2**32


def test_the_grid_has_examples_of_every_document():
    grid = MultiSpliceDocumentDataset(Pos=POS, shuffle=True, epochs=None, curriculum=3, batch_size=2, **MULTI).grid(4)
    n = asyncio.run(grid.async_len())
    core = splice.MultiSpliceDocumentDataset(S=16, **MULTI)
    tokens = arrays(take(grid, range(n)))[0]
    frames = core.get_batch(range(len(core)))
    found = [np.flatnonzero((frames.tokens == row).all(axis=1))[0] for row in tokens]
    assert np.bincount(frames.origin.doc_idx[found]).tolist() == [4, 4, 2]
    assert found[:4] == [0, 8, 16, 24]


def test_options_are_checked_by_the_core():
    with pytest.raises(ValueError, match="content_length"):
        SpliceDocumentDataset(Pos=POS, doc_tokens=[1, 2, 3], pad_token_id=0, content_length=1)
    with pytest.raises(TypeError, match="no_such"):
        SpliceDocumentDataset(Pos=POS, doc_tokens=[1, 2, 3], pad_token_id=0, no_such=1)
    with pytest.raises(ValueError, match="batch size"):
        MultiSpliceDocumentDataset(Pos=POS, curriculum=3, **MULTI)
    with pytest.raises(ValueError, match="epochs"):
        SpliceDocumentDataset(Pos=POS, doc_tokens=[1, 2, 3], pad_token_id=0, epochs=0)
    for name, instead in (("S", "Pos"), ("seed", "rng_key")):
        with pytest.raises(ValueError, match=instead):
            SpliceDocumentDataset(Pos=POS, doc_tokens=[1, 2, 3], pad_token_id=0, **{name: 9})
