"""Log output of the datasets: the lines of the spec at INFO, warnings for surprises, otherwise nothing."""

import ast
import logging
import re

import numpy as np
import pytest

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.splice import (
    MultiSpliceDocumentDataset,
    SpliceDocumentDataset,
    SpliceMultiDocumentLMConfig,
    SpliceSingleDocumentLMConfig,
)
from tests.cache import UNLIMITED, ByteTokenizer, no_waiting
from tests.splice import NULL, documents

LENGTHS = [40, 25, 30]


def multi(lengths=LENGTHS, **options):
    fixed = {"S": options.pop("S", 16), "pad_token_id": NULL}
    return MultiSpliceDocumentDataset(doc_tokens_list=documents(lengths), **fixed, **options)


@pytest.fixture
def logged(caplog):
    """A function that calls `make` and returns the log lines at INFO."""

    def lines(make, level=logging.INFO):
        caplog.clear()
        with caplog.at_level(level, logger="niels_gpt"):
            make()
        assert {record.name.split(".")[0] for record in caplog.records} <= {"niels_gpt"}
        return [record.getMessage() for record in caplog.records]

    return lines


@pytest.fixture
def warned(logged, caplog):
    """The same for warnings."""

    def lines(make):
        found = logged(make, logging.WARNING)
        assert {record.levelname for record in caplog.records} <= {"WARNING"}
        return found

    return lines


def field(lines, name):
    """The value after `name=` in the lines."""
    (found,) = [m[1] for line in lines for m in [re.search(rf"\b{name}=(\[[^\]]*\]|\S+)", line)] if m]
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logging") / "cache"
    options = {"tokenizer": ByteTokenizer(), "max_train_tokens": UNLIMITED, "max_val_tokens": 0, "seed": 1}
    with no_waiting():
        build_pretrain_cache(
            ["x" * n for n in (9, 29, 19)], str(folder), shard_bytes=32, shuffle_buffer=None, **options
        )
    return folder


def test_info_lines_of_a_dataset(logged):
    lines = logged(lambda: multi(balance_mode="by_document", content_stride=2, content_length=10))
    assert all(line.startswith("[multi_splice] ") for line in lines)
    assert ast.literal_eval(field(lines, "doc_lengths")) == LENGTHS
    starts = [(length - 10) // 2 + 1 for length in LENGTHS]
    wanted = {"num_docs": "3", "S": "16", "content_length": "10", "content_stride": "2", "mode": "coverage_balanced"}
    wanted |= {"balance_mode": "by_document", "total_pairs": str(3 * max(starts))}
    assert {name: field(lines, name) for name in wanted} == wanted
    assert ast.literal_eval(field(lines, "pairs_per_doc")) == [max(starts)] * 3


@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_info_lines_by_temperature(logged, tau):
    plain = logged(multi)
    assert (field(plain, "pairs_per_doc"), field(plain, "total_pairs")) == ("[25, 10, 15]", "50")
    assert not [line for line in plain if "doc_probs" in line]
    options = {"balance_mode": "by_temperature", "balance_tau": tau, "epoch_length": 2000}
    assert field(logged(lambda: multi(sampler="stream", **options)), "sampler") == "stream"
    lines = logged(lambda: multi(**options))
    assert f"[multi_splice] doc_probs ~ length^{tau:g} normalized" in lines
    mass = [length**tau for length in LENGTHS]
    fractions = ast.literal_eval(field(lines, "expected_doc_fraction"))
    assert fractions == pytest.approx([m / sum(mass) for m in mass], abs=1e-3)
    assert sum(ast.literal_eval(field(lines, "pairs_per_doc"))) == 2000


def test_info_lines_of_selected_documents(logged, cache):
    config = SpliceMultiDocumentLMConfig(num_docs=2, doc_select_mode="longest")
    lines = logged(lambda: MultiSpliceDocumentDataset.from_cache(cache, S=8, config=config))
    selected = [line for line in lines if "Selected" in line]
    assert selected == ["[multi_splice] Selected doc_idx=1, length=30", "[multi_splice] Selected doc_idx=2, length=20"]
    lines = logged(lambda: SpliceDocumentDataset.from_cache(cache, S=8, doc_index=2))
    assert lines[0] == "[splice] Selected doc_idx=2, length=20"
    assert all(line.startswith("[splice] ") for line in lines)
    assert (field(lines, "doc_lengths"), field(lines, "total_pairs")) == ("[20]", "13")


def test_at_most_20_documents_are_listed(logged):
    """The rest is a count."""
    docs = [np.arange(2 + i % 7) for i in range(5_000)]
    lines = logged(lambda: MultiSpliceDocumentDataset(S=4, doc_tokens_list=docs, pad_token_id=NULL, sampler="stream"))
    assert max(map(len, lines)) < 1000
    assert field(lines, "num_docs") == "5000"
    assert any("4980 more" in line for line in lines)


def test_no_output_at_the_default_level(capfd, warned, cache):
    def make():
        multi(balance_mode="by_temperature", balance_tau=0.7, offset_jitter=3, content_length=10)
        SpliceDocumentDataset(S=8, doc_tokens=range(20), pad_token_id=NULL)
        dataset = MultiSpliceDocumentDataset.from_cache(cache, S=8, curriculum=2)
        for step in range(6):
            dataset.gather(dataset.plan(0, step, 4))
        SpliceSingleDocumentLMConfig(doc_index=1, min_doc_length=10).select(LENGTHS)
        SpliceMultiDocumentLMConfig(num_docs=2).select(LENGTHS)

    assert warned(make) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "shortest"),
    [
        ({"content_length": 8, "adaptive_k": False}, 8),
        ({"min_copy_len": 5}, 5),
        ({"mode": "slide"}, 10),
        ({"content_start_mode": "cyclic_roll", "content_length": 8, "adaptive_k": False}, 8),
        ({"content_start_mode": "slide_within", "content_length": 8, "adaptive_k": False}, 2),
        ({"content_start_mode": "slide_within", "content_length": 8, "min_copy_len": 4}, 4),
    ],
)
def test_documents_without_examples_are_counted(warned, options, shortest):
    """The warning names the minimum length: one token less gives no example."""
    lengths = [20, shortest - 1, 1, shortest]
    (line,) = warned(lambda: multi(lengths, S=10, **options))
    assert "2 of 4 documents give no example" in line
    assert f"shorter than {shortest} tokens" in line


def test_jitter_without_effect_warns(warned):
    (line,) = warned(lambda: multi(offset_jitter=3))
    assert "offset_jitter=3" in line
    assert "16" in line
    assert warned(lambda: multi(offset_jitter=3, content_length=15)) == []
    assert warned(lambda: multi([40, 9], offset_jitter=3)) == []  # the short document can move


def test_doc_index_outside_the_length_limits_warns(warned):
    config = SpliceSingleDocumentLMConfig(doc_index=1, min_doc_length=28, doc_select_mode="longest")
    (line,) = warned(lambda: config.select(LENGTHS))
    for part in ("document 1", "25 tokens", "at least 28", "longest"):
        assert part in line
    assert warned(lambda: SpliceSingleDocumentLMConfig(doc_index=2, min_doc_length=28).select(LENGTHS)) == []


def test_too_few_documents_are_filled_up(warned):
    config = SpliceMultiDocumentLMConfig(num_docs=3, min_doc_length=35, strict_num_docs=False)
    chosen = []
    (line,) = warned(lambda: chosen.extend(config.select(LENGTHS)))
    assert chosen == [0, 2, 1]
    for part in ("1 of 3", "at least 35", "longest 2", "3 in total"):
        assert part in line


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"shuffle_offsets": True}, ["shuffle_offsets"]),
        ({"shuffle_offsets": True, "mode": "slide", "S": 4}, ["shuffle_offsets"]),
        ({"shuffle_offsets": True, "content_start_mode": "cyclic_roll", "S": 4}, ["shuffle_offsets"]),
        ({"shuffle_offsets": True, "shuffle_content": True}, ["shuffle_offsets"]),
        ({"shuffle_content": True, "content_start_mode": "anchor_start"}, ["shuffle_content"]),
        ({"shuffle_content": True}, []),
        ({"shuffle_offsets": True, "content_start_mode": "slide_within"}, []),
        ({"shuffle_offsets": True, "content_start_mode": "anchor_start"}, []),
        ({}, []),
    ],
)
def test_a_shuffled_axis_with_nothing_to_shuffle_warns(caplog, options, warned):
    given = {"S": 8, "doc_tokens_list": [range(1, 20), range(1, 9)], "pad_token_id": 0, "content_length": 4}
    dataset = MultiSpliceDocumentDataset(**given | options)
    messages = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [message.split()[0] for message in messages] == warned
    in_order = list(dataset.epoch(0, 0)) == list(range(len(dataset)))
    assert ["order of enumeration" in message for message in messages] == [in_order] * len(warned)
