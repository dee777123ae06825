import math

import numpy as np
import pytest

from niels_gpt.splice import MultiSpliceDocumentDataset, SpliceDocumentDataset
from tests.splice import NULL, document, documents, tuples

FIVE = np.arange(5)
THREE = documents([7, 5, 3])


def single(doc=FIVE, S=5, **options):
    return SpliceDocumentDataset(S=S, doc_tokens=doc, pad_token_id=NULL, **options)


def multi(docs=THREE, S=8, **options):
    return MultiSpliceDocumentDataset(S=S, doc_tokens_list=docs, pad_token_id=NULL, **options)


# --- one document ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_copy_len": 1}, "1"),
        ({"min_copy_len": -4}, "-4"),
        ({"content_length": 1}, "1"),
        ({"content_length": 0}, "0"),
        ({"content_length": -6}, "-6"),
        ({"content_stride": 0}, "0"),
        ({"content_stride": -3}, "-3"),
        ({"offset_stride": 0}, "0"),
        ({"offset_stride": -3}, "-3"),
        ({"S": 1}, "1"),
        ({"S": 0}, "0"),
        ({"S": -8}, "-8"),
        ({"alpha": -0.25}, "-0.25"),
        ({"offset_jitter": -7}, "-7"),
        ({"content_start_mode": "sideways"}, "sideways"),
        ({"mode": "sideways"}, "sideways"),
        ({"offset_bound": "sideways"}, "sideways"),
        ({"jitter_mode": "sideways"}, "sideways"),
    ],
)
def test_bad_numbers_and_names_are_refused_by_value(options, named):
    with pytest.raises(ValueError, match=named):
        single(**options)


@pytest.mark.parametrize("mode", ["anchor_start", "slide_within", "cyclic_roll"])
def test_weights_and_jitter_belong_to_balanced_coverage(mode):
    with pytest.raises(ValueError, match="alpha"):
        single(content_start_mode=mode, alpha=0.5)
    with pytest.raises(ValueError, match="jitter"):
        single(content_start_mode=mode, content_length=2, offset_jitter=1)


@pytest.mark.parametrize(
    "options",
    [
        {"doc": np.zeros(0, dtype=np.int64)},
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
def test_a_dataset_without_examples_is_refused(options):
    with pytest.raises(ValueError):
        single(**options)


def test_fixed_k_takes_documents_that_are_long_enough():
    assert tuples(single(document(5), 8, content_length=5, adaptive_k=False).pairs()) == [(0, 3)]
    assert tuples(single(document(6), 5, content_length=50, adaptive_k=False).pairs()) == [(0, 0), (1, 0)]
    assert tuples(single(document(4), 8, content_length=5).pairs()) == [(0, 4)]  # adaptive is the default


# --- several documents -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_copy_len": 1}, "1"),
        ({"content_length": 1}, "1"),
        ({"content_stride": 0}, "0"),
        ({"offset_stride": -3}, "-3"),
        ({"S": 1}, "1"),
        ({"alpha": -0.25, "balance_mode": "by_temperature"}, "-0.25"),
        ({"balance_tau": 1.5, "balance_mode": "by_temperature"}, "1.5"),
        ({"balance_tau": -0.125, "balance_mode": "by_temperature"}, "-0.125"),
        ({"balance_tau": math.nan, "balance_mode": "by_temperature"}, "nan"),
        ({"offset_jitter": -7}, "-7"),
        ({"content_start_mode": "sideways"}, "sideways"),
        ({"offset_bound": "sideways"}, "sideways"),
        ({"balance_mode": "sideways"}, "sideways"),
        ({"jitter_mode": "sideways"}, "sideways"),
        ({"sampler": "sideways"}, "sideways"),
        ({"epoch_length": 0}, "0"),
        ({"epoch_length": -5}, "-5"),
        ({"docs": []}, "document"),
        ({"docs": [[1, 2, 3], np.array([1.0, 2.0])]}, r"(?i)float|integer"),
        ({"docs": [[1], [2]]}, "2"),  # documents, and tokens that a span needs
        ({"docs": documents([3, 4]), "min_copy_len": 5}, "5"),
        ({"docs": documents([3, 4]), "content_length": 5, "adaptive_k": False}, "5"),
    ],
)
def test_bad_input_for_several_documents(options, named):
    with pytest.raises(ValueError, match=named):
        multi(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"balance_mode": "by_coverage"},
        {"balance_mode": "by_document"},
        {"balance_mode": "by_temperature", "content_start_mode": "slide_within"},
        {"balance_mode": "by_temperature", "content_start_mode": "anchor_start"},
        {"balance_mode": "by_temperature", "content_start_mode": "cyclic_roll"},
        {"sampler": "stream", "content_start_mode": "slide_within"},
    ],
)
def test_edge_weights_are_refused_where_they_have_no_meaning(options):
    with pytest.raises(ValueError, match="alpha"):
        multi(alpha=0.5, content_length=3, **options)


@pytest.mark.parametrize("mode", ["anchor_start", "slide_within", "cyclic_roll"])
def test_jitter_of_several_documents_belongs_to_balanced_coverage(mode):
    with pytest.raises(ValueError, match="jitter"):
        multi(content_start_mode=mode, content_length=2, offset_jitter=1)
