import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from niels_gpt.splice import (
    MultiSpliceDocumentDataset,
    SpliceDocumentDataset,
    SpliceMultiDocumentLMConfig,
    SpliceSingleDocumentLMConfig,
)
from tests.splice import NULL, document, documents, tuples

FIVE = np.arange(5)
THREE = documents([7, 5, 3])


def single(doc=FIVE, S=5, **options):
    return SpliceDocumentDataset(S=S, doc_tokens=doc, pad_token_id=NULL, **options)


def multi(docs=THREE, S=8, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=docs, pad_token_id=NULL, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_copy_len": 1}, "1"),
        ({"content_length": 1}, "1"),
        ({"content_stride": 0}, "0"),
        ({"offset_stride": -3}, "-3"),
        ({"S": 1}, "1"),
        ({"alpha": -0.25}, "-0.25"),
        ({"offset_jitter": -7}, "-7"),
        *(({name: "sideways"}, "sideways") for name in ("content_start_mode", "mode", "offset_bound", "jitter_mode")),
    ],
)
def test_invalid_option_is_named_with_its_value(options, named):
    for make in (single, multi):
        with pytest.raises(ValueError, match=named):
            make(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"balance_tau": 1.5, "balance_mode": "by_temperature"}, "1.5"),
        ({"balance_tau": math.nan, "balance_mode": "by_temperature"}, "nan"),
        ({"balance_mode": "sideways"}, "sideways"),
        ({"sampler": "sideways"}, "sideways"),
        ({"epoch_length": 0}, "0"),
        ({"sampler": "enumerate", "epoch_length": 9}, "epoch_length.*quota"),
        ({"sampler": "enumerate", "groups": ["a", "b", "a"]}, "groups.*quota"),
        ({"sampler": "enumerate", "balance_mode": "by_temperature"}, "by_temperature.*quota"),
        ({"docs": []}, "document"),
        ({"docs": [[1], [2]]}, "2"),  # documents, and tokens that a span needs
        ({"docs": documents([3, 4]), "min_copy_len": 5}, "5"),
        ({"docs": documents([3, 4]), "content_length": 5, "adaptive_k": False}, "5"),
    ],
)
def test_invalid_options_of_several_documents(options, named):
    with pytest.raises(ValueError, match=named):
        multi(**options)


@pytest.mark.parametrize("mode", ["anchor_start", "slide_within", "cyclic_roll"])
def test_alpha_and_jitter_need_coverage_balanced(mode):
    with pytest.raises(ValueError, match="alpha"):
        single(content_start_mode=mode, alpha=0.5)
    with pytest.raises(ValueError, match="jitter"):
        single(content_start_mode=mode, content_length=2, offset_jitter=1)


@pytest.mark.parametrize(
    "options",
    [
        {"doc": []},
        {"doc": [1]},
        {"doc": document(4), "min_copy_len": 5},
        {"min_copy_len": 6, "doc": document(20)},  # longer than the frame
        {"content_length": 3, "min_copy_len": 4},
        {"doc": document(4), "adaptive_k": False},
        {"doc": document(4), "S": 8, "content_length": 5, "adaptive_k": False},
        {"doc": document(4), "mode": "slide"},
    ],
)
def test_dataset_without_examples_raises(options):
    with pytest.raises(ValueError):
        single(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "enumerate"},
        {"balance_mode": "by_temperature", "content_start_mode": "cyclic_roll"},
        {"sampler": "stream", "content_start_mode": "slide_within"},
    ],
)
def test_alpha_needs_a_weighted_sampler(options):
    with pytest.raises(ValueError, match="alpha"):
        multi(alpha=0.5, content_length=3, **options)


HUGE = ["content_length", "content_stride", "offset_stride", "min_copy_len", "offset_jitter"]
HUGE += ["epoch_length", "curriculum"]
MOST = 2**62


@pytest.mark.parametrize("name", HUGE)
def test_numbers_past_the_limit_are_named(name):
    value = 2**62 + 1
    with pytest.raises(ValueError, match=rf"^{name}\b.*{MOST}.*{value}"):
        multi(**{name: value})
    with pytest.raises(ValueError, match=rf"splice\.{name}\b.*{MOST}.*{value}"):
        SpliceMultiDocumentLMConfig(**{name: value})
    if name not in ("epoch_length", "curriculum"):
        with pytest.raises(ValueError, match=rf"^{name}\b.*{MOST}.*{value}"):
            single(**{name: value})


@pytest.mark.parametrize("mode", ["coverage_balanced", "anchor_start", "slide_within", "cyclic_roll"])
def test_largest_accepted_numbers(mode):
    strides = {"content_stride": MOST, "offset_stride": MOST}
    assert tuples(single(content_start_mode=mode, content_length=3, **strides).pairs())[0][0] == 0
    assert len(single(content_length=3, alpha=0.5, content_stride=MOST)) == 1
    assert multi(offset_jitter=MOST, content_length=3)[0].origin.s <= 5
    ds = multi(epoch_length=MOST, sampler="stream")
    assert len(ds) == sum(ds.quotas) == MOST
    assert ds[MOST - 1].origin.length
    assert len(list(itertools.islice(ds.epoch(0, 0), 5))) == 5
    with pytest.raises(ValueError, match="no examples"):
        multi(min_copy_len=MOST)


@pytest.mark.parametrize(
    ("step", "B", "named"),
    [
        (2**62, 4, rf"step.*{2**60}.*{2**62}"),
        (10**30, 1, rf"step.*{MOST}.*{10**30}"),
        (1.5, 4, r"step.*1\.5"),
        (-1, 4, "step.*-1"),
        (0, 2.5, r"B.*2\.5"),
        (0, -1, "B.*-1"),
        (0, 0, "B.*0"),
        (0, 10**20, f"B.*{MOST}.*{10**20}"),
    ],
)
def test_invalid_steps_and_batch_sizes(step, B, named):
    with pytest.raises(ValueError, match=named):
        multi().plan(0, step, B)


def test_late_step():
    plan = multi().plan(0, np.int64(2**60), np.int32(4))
    assert plan.indices.dtype == np.int64
    assert (plan.indices >= 0).all() and (plan.epochs > 0).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"docs": None}, "doc_tokens_list.*None"),
        ({"doc_weights": ["a", "b", "c"]}, r"doc_weights.*\['a', 'b', 'c'\]"),
        ({"doc_weights": [[1], [2, 3]]}, "doc_weights"),
        ({"groups": 5}, "groups.*label.*5"),
        ({"groups": [[1], [2], [3]]}, "groups.*label"),
        ({"alpha": "x"}, "alpha.*'x'"),
        ({"alpha": 10**400}, "alpha.*finite"),
        ({"balance_tau": True}, "balance_tau.*True"),
    ],
)
def test_wrong_types_are_named(options, named):
    with pytest.raises(ValueError, match=named) as err:
        multi(**options)
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("indices", [5, None, [0.5], ["a"], [[0, 1]], [[0], [1, 2]], [True]])
def test_example_indices_of_a_wrong_type(indices):
    with pytest.raises(ValueError, match="indices must be a list of integers"):
        multi().get_batch(indices)


def test_curriculum_cannot_start_with_a_document_of_weight_0():
    with pytest.raises(ValueError, match=r"curriculum.*document 0.*doc_weights.*0"):
        multi(doc_weights=[0, 1, 1], curriculum=5)
    with pytest.raises(ValueError, match=r"curriculum.*document 1"):  # document 0 has no example
        multi(documents([3, 5, 7]), min_copy_len=4, doc_weights=[1, 0, 1], curriculum=5)
    later = multi(doc_weights=[1, 0, 1], curriculum=5)
    assert set(later.gather(later.plan(0, 12, 30)).origin.doc_idx.tolist()) == {0, 2}


@pytest.mark.parametrize(("kind", "integer"), [(np.float16, np.uint8), (np.float64, np.int64)])
def test_numpy_numbers_equal_python_numbers(kind, integer):
    options = {"alpha": 0.5, "balance_tau": 0.25, "epoch_length": 40, "content_length": 4, "content_stride": 2,
               "offset_stride": 3, "min_copy_len": 2, "offset_jitter": 1, "curriculum": 7, "seed": 3}  # fmt: skip
    given = {name: integer(value) if isinstance(value, int) else kind(value) for name, value in options.items()}
    shared = {"balance_mode": "by_temperature", "doc_weights": [1.0, 0.5, 2.0]}
    ours, theirs = (
        multi(S=S, **values, **shared | {"doc_weights": weights})
        for S, values, weights in ((8, options, [1.0, 0.5, 2.0]), (integer(8), given, [kind(1), kind(0.5), kind(2)]))
    )
    assert tuples(ours.triples(1)) == tuples(theirs.triples(1))
    assert ours.quotas == theirs.quotas
    config = SpliceMultiDocumentLMConfig(**given, num_docs=integer(2), doc_weights=(kind(0.5), kind(1)))
    assert config == SpliceMultiDocumentLMConfig(**options, num_docs=2, doc_weights=(0.5, 1.0))
    json.dumps(dataclasses.asdict(config))  # plain numbers, for the file of a run
    assert SpliceSingleDocumentLMConfig(doc_index=integer(1), alpha=kind(0.5)).select([5, 6, 7]) == [1]


@pytest.mark.parametrize("cls", [SpliceDocumentDataset, MultiSpliceDocumentDataset])
@pytest.mark.parametrize(
    ("option", "instead"),
    [("rng_key", "seed"), ("Pos", "S,"), ("base", "from_cache"), ("epochs", "plan"), ("k_t", "content_stride"),
     ("shufle", "shuffle"), ("order_options", "")],
)  # fmt: skip
def test_unknown_options_name_the_class_and_what_to_use(cls, option, instead):
    name = cls.__name__
    with pytest.raises(TypeError, match=rf"^{name} has no option {option}: .*{instead}"):
        cls(**{option: 1})
    if option != "base":
        with pytest.raises(TypeError, match=rf"^{name}.from_cache has no option {option}: .*{instead}"):
            cls.from_cache("nowhere", S=8, **{option: 1})


def test_options_of_several_documents_are_no_options_of_one():
    with pytest.raises(TypeError, match=r"SpliceDocumentDataset has no option balance_mode"):
        SpliceDocumentDataset(S=8, doc_tokens=[1, 2, 3], pad_token_id=0, balance_mode="by_document")


@pytest.mark.parametrize(
    ("option", "value"),
    [("shuffle", "false"), ("shuffle_per_epoch", 0), ("eos_before_span", "no"), ("trailing_segment_zero", 1),
     ("adaptive_k", "false"), ("dataset_name", 5)],
)  # fmt: skip
def test_types_of_options(option, value):
    with pytest.raises(ValueError, match=rf"^{option} must be"):
        SpliceDocumentDataset(S=8, doc_tokens=[1, 2, 3], pad_token_id=0, eos_token_id=1, **{option: value})


def test_a_stream_has_no_order_to_repeat():
    options = {"S": 8, "doc_tokens_list": [range(1, 20)], "pad_token_id": 0, "content_length": 4}
    with pytest.raises(ValueError, match=r"shuffle_per_epoch=False.*sampler='stream'.*sampler='quota'"):
        MultiSpliceDocumentDataset(**options, sampler="stream", shuffle_per_epoch=False)
    MultiSpliceDocumentDataset(**options, sampler="quota", shuffle_per_epoch=False)


@pytest.mark.parametrize("option", ["eos_before_span", "trailing_segment_zero"])
def test_packed_frames_have_no_filler(option):
    dataset = SpliceDocumentDataset(S=8, doc_tokens=range(1, 20), pad_token_id=0, eos_token_id=9, **{option: True})
    dataset.get_batch([0, 1])
    with pytest.raises(ValueError, match=rf"packed=False.*{option}"):
        dataset.get_batch([0, 1], packed=True)
