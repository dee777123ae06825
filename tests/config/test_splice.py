"""Options of splice studies, and the choice of documents."""

import copy
import itertools
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from niels_gpt.config.splice import SpliceConfig, count
from niels_gpt.splice import SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig

LENGTHS = [50, 10, 80, 80, 5, 30, 60, 10]
"""Lengths of documents; two are longest, two have the same short length."""
MULTI_MODES = ("longest", "shortest", "random", "first")
SINGLE_MODES = ("first", "longest", "random")


def ints(chosen):
    assert isinstance(chosen, list)
    return [int(i) for i in chosen]


def many(num_docs, mode="longest", lengths=LENGTHS, **options):
    return ints(SpliceMultiDocumentLMConfig(num_docs=num_docs, doc_select_mode=mode, **options).select(lengths))


def one(mode="first", lengths=LENGTHS, **options):
    (chosen,) = ints(SpliceSingleDocumentLMConfig(doc_select_mode=mode, **options).select(lengths))
    return chosen


def candidates(lengths, low, high):
    return [i for i, n in enumerate(lengths) if (low is None or n >= low) and (high is None or n <= high)]


# --- several documents -------------------------------------------------------------------------------


def test_the_longest_come_first():
    # The debug output of the specification has decreasing lengths for "longest".
    assert many(5) == [2, 3, 6, 0, 5]
    assert set(many(2, "shortest", min_doc_length=10)) == {1, 7}
    assert many(3, "first", min_doc_length=20) == [0, 2, 3]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    low=st.none() | st.integers(1, 30),
    high=st.none() | st.integers(1, 30),
    num_docs=st.integers(1, 8),
    mode=st.sampled_from(MULTI_MODES),
)
def test_choices_are_candidates(lengths, low, high, num_docs, mode):
    possible = candidates(lengths, low, high)
    options = {"min_doc_length": low, "max_doc_length": high}
    if len(possible) < num_docs:
        with pytest.raises(ValueError):
            many(num_docs, mode, lengths, **options)
        return
    chosen = many(num_docs, mode, lengths, **options)
    assert chosen == many(num_docs, mode, lengths, **options)
    assert len(set(chosen)) == len(chosen) == num_docs
    assert set(chosen) <= set(possible)
    ranked = {
        "longest": sorted(possible, key=lambda i: (-lengths[i], i)),
        "shortest": sorted(possible, key=lambda i: (lengths[i], i)),
        "first": possible,
    }
    if mode != "random":
        assert set(chosen) == set(ranked[mode][:num_docs])


def test_random_depends_on_lengths_and_number():
    lengths = list(range(100, 140))
    chosen = {n: many(n, "random", lengths) for n in range(1, 20)}
    assert chosen[7] == many(7, "random", list(lengths))
    assert len({min(picks) for picks in chosen.values()}) > 3
    # Other lengths give another draw, even with the same candidates.
    draws = [tuple(sorted(many(3, "random", [*lengths, extra], min_doc_length=100))) for extra in range(1, 100)]
    assert len(set(draws)) > 50
    assert set(itertools.chain(*draws)) == set(range(40))


def test_random_is_the_same_on_every_machine():
    assert [many(n, "random") for n in (1, 3)] == [[3], [2, 3, 7]]
    assert one("random") == 3


def test_random_does_not_move_global_generators(random_states):
    before = random_states()
    many(3, "random")
    one("random")
    assert random_states() == before


def test_too_few_documents_are_an_error():
    with pytest.raises(ValueError, match=r"(?s)(?=.*\b4\b)(?=.*\b3\b)"):
        many(4, min_doc_length=60)
    with pytest.raises(ValueError):
        many(1, lengths=[])


@pytest.mark.parametrize("mode", ["shortest", "random"])
def test_the_longest_others_are_added(mode, caplog):
    with caplog.at_level(logging.INFO):
        chosen = many(5, mode, min_doc_length=60, strict_num_docs=False)
    assert set(chosen) == {2, 3, 6} | {0, 5}
    assert len(chosen) == 5
    assert set(chosen[:3]) == {2, 3, 6}
    (line,) = (record.getMessage() for record in caplog.records)
    assert "3 of 5" in line and "longest 2" in line
    assert set(many(3, mode, min_doc_length=60, strict_num_docs=False)) == {2, 3, 6}
    # ties among the added documents go to the lower index
    assert set(many(2, mode, max_doc_length=5, strict_num_docs=False)) == {4, 2}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=15),
    budget=st.integers(1, 200),
    num_docs=st.integers(1, 5),
    mode=st.sampled_from(MULTI_MODES),
)
def test_the_training_subset_is_what_ends_within_it(lengths, budget, num_docs, mode):
    inside = [i for i in range(len(lengths)) if sum(lengths[: i + 1]) <= budget]
    options = {"restrict_to_training_subset": True, "max_train_tokens": budget}
    if len(inside) < num_docs:
        with pytest.raises(ValueError):
            many(num_docs, mode, lengths, **options)
    else:
        assert set(many(num_docs, mode, lengths, **options)) <= set(inside)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "tallest"}, "tallest"),
        ({"num_docs": 0}, "0"),
        ({"num_docs": -2}, "-2"),
        ({"min_doc_length": 70, "max_doc_length": 20, "num_docs": 1}, "70"),
    ],
)
def test_invalid_selections(options, named):
    with pytest.raises(ValueError, match=named):
        many(**{"num_docs": 2, **options})


# --- one document ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    low=st.none() | st.integers(1, 40),
    high=st.none() | st.integers(1, 40),
    mode=st.sampled_from(SINGLE_MODES),
    data=st.data(),
)
def test_one_document_against_the_rules(lengths, low, high, mode, data):
    assume(low is None or high is None or low <= high)
    index = data.draw(st.none() | st.integers(0, len(lengths) - 1))
    chosen = one(mode, lengths, doc_index=index, min_doc_length=low, max_doc_length=high)
    possible = candidates(lengths, low, high)
    if not possible:
        assert chosen == lengths.index(max(lengths))
    elif index in possible:
        assert chosen == index
    elif mode == "first":
        assert chosen == possible[0]
    elif mode == "longest":
        assert chosen == max(possible, key=lambda i: (lengths[i], -i))
    else:
        assert chosen in possible
        assert chosen == one(mode, lengths, doc_index=index, min_doc_length=low, max_doc_length=high)


def test_the_training_subset_for_one_document():
    options = {"restrict_to_training_subset": True}
    assert one("longest", max_train_tokens=139, **options) == 0
    assert one("longest", max_train_tokens=140, **options) == 2
    assert one("first", max_train_tokens=139, max_doc_length=20, **options) == 1


@pytest.mark.parametrize(
    "options", [{"mode": "tallest"}, {"lengths": []}, {"doc_index": 8}, {"doc_index": 100, "min_doc_length": 20}]
)
def test_invalid_choices(options):
    with pytest.raises((ValueError, IndexError)):
        one(**options)


def test_defaults():
    config = SpliceMultiDocumentLMConfig()
    assert (config.num_docs, config.doc_select_mode, config.strict_num_docs) == (10, "longest", True)
    assert (config.min_doc_length, config.max_doc_length) == (None, None)
    assert (config.content_length, config.content_stride, config.offset_stride) == (None, 1, 1)
    assert (config.content_start_mode, config.min_copy_len, config.alpha) == ("coverage_balanced", 2, 0.0)
    assert (config.adaptive_k, config.offset_jitter, config.jitter_mode) == (True, 0, "uniform")
    assert (config.balance_mode, config.balance_tau, config.epoch_length) == ("by_temperature", 1.0, None)
    assert config.restrict_to_training_subset is False
    single = SpliceSingleDocumentLMConfig()
    assert (single.doc_index, single.min_doc_length, single.max_doc_length) == (None, None, None)
    assert (single.content_length, single.content_stride, single.offset_stride) == (None, 1, 1)
    assert (single.content_start_mode, single.mode) == ("coverage_balanced", "splice")


# --- limits of the options ---------------------------------------------------------------------------


def test_count_names_only_the_limit_that_is_violated():
    assert count("k", 5) == 5
    with pytest.raises(ValueError) as caught:
        count("k", 0, 1, 9)
    assert "9" not in str(caught.value)
    with pytest.raises(ValueError, match=r"1 to 9, got 10"):
        count("k", 10, 1, 9)


def test_limits_of_the_length():
    assert SpliceConfig(min_doc_length=5, max_doc_length=5).min_doc_length == 5
    with pytest.raises(ValueError, match=r"min_doc_length=6 .*max_doc_length=5"):
        SpliceConfig(min_doc_length=6, max_doc_length=5)


def test_the_training_subset_by_batches():
    config = SpliceConfig(restrict_to_training_subset=True, max_train_batches=3, initial_batch_size=2, num_docs=1)
    assert config.train_tokens(10) == 60
    with pytest.raises(ValueError, match="pass S"):
        config.train_tokens()
    assert SpliceConfig(max_train_tokens=7).train_tokens() == 7
    assert config.within_limits([30, 30, 1], S=10).tolist() == [0, 1]
    assert config.within_limits([30, 30, 1], ends=np.array([61, 60, 59]), S=10).tolist() == [1, 2]
    for options in ({}, {"max_train_batches": 3}, {"initial_batch_size": 3}):
        incomplete = SpliceConfig(restrict_to_training_subset=True, **options)
        with pytest.raises(ValueError, match="max_train_tokens"):
            incomplete.within_limits([30, 30, 1], S=10)
        assert incomplete.for_run(3, 3).train_tokens(10) == 90


def test_choose_one_document_or_several():
    assert SpliceConfig(doc_index=3).num_docs == 1
    assert SpliceConfig(doc_index=3).select(LENGTHS, S=8) == [3]
    assert SpliceConfig(num_docs=2).select(LENGTHS, S=8) == [2, 3]
    with pytest.raises(ValueError, match=r"doc_index=8.*8 documents \(0 to 7\)"):
        SpliceConfig(doc_index=8).select(LENGTHS, S=8)


def test_dataset_options():
    config = SpliceMultiDocumentLMConfig(content_length=4, seed=3)
    options = config.dataset_options()
    assert options["content_length"] == 4 and options["seed"] == 3 and options["balance_mode"] == "by_temperature"
    assert "pad_token_id" not in options and "num_docs" not in options
    assert "balance_mode" not in SpliceSingleDocumentLMConfig(pad_token_id=0).dataset_options()
    assert SpliceSingleDocumentLMConfig(pad_token_id=0).dataset_options()["pad_token_id"] == 0


@pytest.mark.parametrize("cls", [SpliceSingleDocumentLMConfig, SpliceMultiDocumentLMConfig])
def test_a_base_that_is_not_a_folder(cls):
    with pytest.raises(ValueError, match=r"base.*levanter"):
        cls(base={"type": "mixture"})
    assert cls(base="caches", dataset_name="roam", tokenizer="t", doc_key="k", shuffle_per_epoch=False).doc_key == "k"


@pytest.mark.parametrize(
    ("cls", "option", "instead"),
    [
        (SpliceMultiDocumentLMConfig, "K", "content_length"),
        (SpliceMultiDocumentLMConfig, "doc_index", "single-document class"),
        (SpliceSingleDocumentLMConfig, "num_docs", "multi-document class"),
        (SpliceSingleDocumentLMConfig, "Pos", "niels_gpt.levanter"),
        (SpliceSingleDocumentLMConfig, "min_doc_len", "min_doc_length"),
    ],
)
def test_unknown_options_name_the_class_and_what_to_use(cls, option, instead):
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no option {option}: .*{instead}"):
        cls(**{option: 3})
    assert pickle.loads(pickle.dumps(cls(content_length=9))) == copy.copy(cls(content_length=9))


def test_numpy_values_and_paths_become_plain_values():
    config = SpliceMultiDocumentLMConfig(
        alpha=np.array([0.5, 1]), content_stride=np.array([2, 3]), shuffle=np.False_, base=Path("caches")
    )
    assert (config.alpha, config.content_stride, config.base) == ((0.5, 1.0), (2, 3), "caches")
    assert config.shuffle is False
    with pytest.raises(ValueError, match=r"splice.alpha must be .* number .*, got array"):
        SpliceMultiDocumentLMConfig(alpha=np.array([[0.5]]))


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, []),
        ({"initial_batch_size": 128}, ["initial_batch_size=128"]),
        ({"max_train_tokens": 9, "max_train_batches": 8}, ["max_train_tokens=9", "max_train_batches=8"]),
        ({"restrict_to_training_subset": True, "initial_batch_size": 128}, []),
        ({"restrict_to_training_subset": True, "max_train_tokens": 9}, []),
        (
            {"restrict_to_training_subset": True, "max_train_tokens": 9, "initial_batch_size": 128},
            ["initial_batch_size=128"],
        ),
    ],
)
def test_limits_without_effect_warn(caplog, options, idle):
    SpliceSingleDocumentLMConfig(**options).warn_about_limits()
    assert len(caplog.records) == bool(idle)
    assert all(text in caplog.text for text in idle)
