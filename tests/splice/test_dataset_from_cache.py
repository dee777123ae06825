"""Documents in a token cache, compared with datasets of the same documents as lists."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.cache.formats import CacheError
from niels_gpt.splice import (
    MultiSpliceDocumentDataset,
    SpliceDocumentDataset,
    SpliceMultiDocumentLMConfig,
    SpliceSingleDocumentLMConfig,
)
from niels_gpt.tokenizer import load_tokenizer, train_tokenizer
from tests.cache import EOT, UNLIMITED, ByteTokenizer, no_waiting, quick_folder
from tests.splice import CONTENT_MODES, NULL, check_dataset
from tests.splice import spans as naive_spans

TEXTS = ["once upon a time", "b", "two\n\nparagraphs of a note", "é 日本", "x" * 70, "the end", "once again, a note"]
"""With shards of 16 tokens, documents end within shards and span up to five of them. Lengths with EOT: 17, 2,
26, 10, 71, 8, 19."""
SHARD_TOKENS = 16
S = 12


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def build(folder, texts=TEXTS, **changes):
    options = {"tokenizer": ByteTokenizer(), "max_train_tokens": UNLIMITED, "max_val_tokens": 0, "seed": 1}
    options |= {"shuffle_buffer": None, "shard_bytes": 2 * SHARD_TOKENS, **changes}
    build_pretrain_cache(texts, str(folder), **options)
    return folder


def ids_of(texts=TEXTS):
    return [[*text.encode("utf-8"), EOT] for text in texts]


@pytest.fixture
def cache(tmp_path):
    return build(tmp_path / "cache")


def starts_of(texts=TEXTS):
    """Offset of the first token of each document, and the end of the last."""
    ends = [0]
    for ids in ids_of(texts):
        ends.append(ends[-1] + len(ids))
    return ends


def keep_only(cache, numbers):
    """Delete all shards but these."""
    for path in (cache / "train").glob("shard_*.bin"):
        if int(path.stem.removeprefix("shard_")) not in numbers:
            path.unlink()


@pytest.mark.parametrize(("mode", "number"), [*zip(CONTENT_MODES, (0, 3, 4, 6), strict=True)])
def test_one_document_equals_its_source(cache, mode, number):
    options = {"content_length": 7, "content_start_mode": mode, "content_stride": 2, "offset_stride": 2}
    dataset = SpliceDocumentDataset.from_cache(cache, S=S, doc_index=number, pad_token_id=NULL, **options)
    doc = ids_of()[number]
    wanted = [(0, *span) for span in naive_spans(S=S, L=len(doc), **options)]
    check_dataset(dataset, [doc], wanted, S)


@settings(max_examples=12)
@given(
    st.lists(st.text("abé\n", min_size=1, max_size=30), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(2, 12),
    st.data(),
)
def test_any_cache_and_any_selection(texts, shard_tokens, frame, data):
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=6))
    with quick_folder() as folder:
        cache = build(folder / "cache", texts, shard_bytes=2 * shard_tokens)
        dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=frame, doc_indices=chosen, pad_token_id=NULL)
        docs = [ids_of(texts)[i] for i in chosen]
        wanted = [(n, *span) for n, doc in enumerate(docs) for span in naive_spans(S=frame, L=len(doc))]
        check_dataset(dataset, docs, wanted, frame)


def test_default_selects_all_documents(cache):
    """Also with selecting options that have their default values."""
    plain = MultiSpliceDocumentDataset(S=S, doc_tokens_list=ids_of(), pad_token_id=NULL)
    none = dict.fromkeys(("base", "dataset_name", "min_doc_length", "max_train_tokens", "num_docs"))
    usual = {"restrict_to_training_subset": False, "shuffle": True, "strict_num_docs": True}
    for options in ({}, *({name: value} for name, value in (none | usual).items())):
        dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, pad_token_id=NULL, **options)
        assert dataset.lengths.tolist() == [17, 2, 26, 10, 71, 8, 19]
        assert dataset.triples().tolist() == plain.triples().tolist()


def test_val_split(tmp_path):
    cache = build(tmp_path / "cache", max_val_tokens=19)
    held_out = MultiSpliceDocumentDataset.from_cache(cache, "val", S=20, pad_token_id=NULL)
    assert held_out.lengths.tolist() == [17, 2]
    assert held_out[1].tokens.tolist() == [NULL] * 18 + ids_of()[1]
    train = SpliceDocumentDataset.from_cache(str(cache), S=30)  # the first document of train
    assert train[0].tokens.tolist() == [EOT] * 4 + ids_of()[2]


def test_config_selects_several_documents_and_sets_options(cache):
    config = SpliceMultiDocumentLMConfig(
        num_docs=3, doc_select_mode="longest", max_doc_length=30, content_length=6, balance_mode="by_document"
    )
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config, pad_token_id=NULL)
    assert dataset.lengths.tolist() == [26, 19, 17]
    assert dataset.quotas == [21, 21, 21]
    assert dataset[21].tokens[6:].tolist() == ids_of()[6][:6]


def test_options_select_without_a_config(cache):
    options = {"num_docs": 3, "doc_select_mode": "longest", "max_doc_length": 30, "content_length": 6}
    dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, pad_token_id=NULL, **options)
    assert dataset.lengths.tolist() == [26, 19, 17]
    assert dataset.quotas == [21, 14, 12]  # the default balance mode of the class: every span once
    subset = {"restrict_to_training_subset": True, "max_train_tokens": starts_of()[3], "num_docs": 3}
    dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, pad_token_id=NULL, **subset)
    assert sorted(dataset.lengths.tolist()) == sorted(len(doc) for doc in ids_of()[:3])
    longest = {"doc_select_mode": "longest", "max_doc_length": 30}
    for options in (longest, {"config": SpliceSingleDocumentLMConfig(**longest)}):
        assert SpliceDocumentDataset.from_cache(cache, "train", S=S, **options).lengths.tolist() == [26]
    with pytest.raises(TypeError, match="num_documents"):
        MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, num_documents=3)


def test_config_sets_filler_and_seed(cache):
    config = SpliceSingleDocumentLMConfig(doc_index=0, content_length=4, pad_token_id=NULL, seed=3, offset_jitter=2)
    made = SpliceDocumentDataset.from_cache(cache, S=S, config=config)
    by_hand = SpliceDocumentDataset(
        S=S, doc_tokens=ids_of()[0], content_length=4, pad_token_id=NULL, seed=3, offset_jitter=2
    )
    np.testing.assert_array_equal(made.get_batch(range(len(made))).tokens, by_hand.get_batch(range(len(made))).tokens)


def test_options_override_the_config(cache):
    config = SpliceMultiDocumentLMConfig(num_docs=2, content_length=6, balance_mode="by_coverage")
    dataset = MultiSpliceDocumentDataset.from_cache(
        cache, S=S, config=config, pad_token_id=NULL, content_length=4, balance_mode="by_document"
    )
    assert set(dataset.get_batch([0, 5]).origin.length.tolist()) == {4}
    assert dataset.quotas == [68, 68]


def test_doc_index_overrides_the_selection_of_the_config(cache):
    one = SpliceSingleDocumentLMConfig(doc_select_mode="longest", content_length=5)
    single = SpliceDocumentDataset.from_cache(cache, S=S, doc_index=3, config=one)
    assert single.lengths.tolist() == [10]
    several = SpliceMultiDocumentLMConfig(num_docs=2, content_length=5)
    multi = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[3, 6], config=several)
    assert multi.lengths.tolist() == [10, 19]
    assert {single[0].origin.length, multi[0].origin.length} == {5}


@pytest.mark.parametrize(("budget", "inside"), [(16, 0), (17, 1), (44, 2), (126, 5)])
def test_training_subset_contains_documents_that_end_within_it(cache, budget, inside):
    """Documents end at 17, 19, 45, 55, 126, 134 and 153."""
    options = {"restrict_to_training_subset": True, "max_train_tokens": budget, "doc_select_mode": "first"}
    if not inside:
        with pytest.raises(ValueError, match="16 tokens"):
            SpliceDocumentDataset.from_cache(cache, S=S, config=SpliceSingleDocumentLMConfig(**options))
        return
    config = SpliceMultiDocumentLMConfig(num_docs=inside, **options)
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config)
    assert dataset.lengths.tolist() == [17, 2, 26, 10, 71, 8, 19][:inside]
    with pytest.raises(ValueError, match=rf"num_docs={inside + 1}, but only {inside} of 7"):
        MultiSpliceDocumentDataset.from_cache(
            cache, S=S, config=SpliceMultiDocumentLMConfig(num_docs=inside + 1, **options)
        )


def test_training_subset_in_batches_of_frames(cache):
    """3 batches of 5 frames of 12 tokens are 180 tokens, all documents; 1 of 5 is 60 tokens, the first four."""
    for batches, longest in ((3, 71), (1, 26)):
        config = SpliceSingleDocumentLMConfig(
            restrict_to_training_subset=True, max_train_batches=batches, initial_batch_size=5, doc_select_mode="longest"
        )
        assert SpliceDocumentDataset.from_cache(cache, S=12, config=config).lengths.tolist() == [longest]


def test_groups_by_source_or_length(cache):
    """Length bins double: 8 and 10 share one, 17, 19 and 26 another; bins have equal shares."""
    chosen = [5, 3, 0, 6, 2, 4]
    options = {"S": 4, "doc_indices": chosen, "balance_mode": "by_temperature", "balance_tau": 0.0}
    lengths = MultiSpliceDocumentDataset.from_cache(cache, groups="length", epoch_length=180, **options)
    assert lengths.quotas == [30, 30, 20, 20, 20, 60]
    alone = MultiSpliceDocumentDataset.from_cache(cache, groups="source", epoch_length=180, **options)
    assert alone.quotas == [30] * 6


def test_only_spans_are_read(cache, monkeypatch):
    """Document 4 starts at token 55, the eighth of shard 3: nine of its tokens are in that shard."""
    monkeypatch.setattr("niels_gpt.cache.mmap.MAX_OPEN", 1)
    dataset = SpliceDocumentDataset.from_cache(cache, S=6, doc_index=4, pad_token_id=NULL)
    keep_only(cache, {3})
    assert dataset.get_batch(range(4)).tokens.tolist() == [ids_of()[4][t : t + 6] for t in range(4)]
    for number in (4, len(dataset) - 1):
        with pytest.raises(CacheError, match=r"cannot open .*shard_"):
            dataset[number]


def test_planning_reads_no_shard(cache, monkeypatch):
    from niels_gpt.cache import mmap

    with monkeypatch.context() as patch:
        patch.setattr(mmap.MappedTokens, "read", lambda *_: pytest.fail("a shard was read"))
        dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S)
        assert len(dataset) == sum(max(length - S + 1, 1) for length in (17, 2, 26, 10, 71, 8, 19))
        dataset.triples()
        list(dataset.epoch(0, 0))
    assert dataset[0].tokens.tolist() == ids_of()[0][:S]


@pytest.mark.parametrize("kind", [SpliceDocumentDataset, MultiSpliceDocumentDataset])
def test_missing_caches_splits_and_offsets_are_named(cache, kind):
    assert issubclass(CacheError, ValueError)
    for folder, split, error, named in (
        (cache.parent / "nowhere", "train", CacheError, "nowhere"),
        (cache, "test", CacheError, "test"),
        (cache, "val", ValueError, r"no document|no folder of shards|no shards"),
    ):
        with pytest.raises(error, match=named):
            kind.from_cache(folder, split, S=S)
    (cache / "train" / "documents.npy").unlink()
    with pytest.raises(CacheError, match=r"documents\.npy.*build the cache again"):
        kind.from_cache(cache, S=S)


def test_invalid_indices(cache):
    with pytest.raises(ValueError, match=r"doc_index=7\b.*7"):
        SpliceDocumentDataset.from_cache(cache, S=S, doc_index=7)
    with pytest.raises(ValueError, match=r"7 documents.*99\b"):
        MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[0, 99])
    with pytest.raises(ValueError, match="no document"):
        MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[])


def test_dataset_in_another_process(cache, tmp_path):
    """A spawned process, as loader workers without fork use. It must not import torch."""
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, pad_token_id=NULL)
    dataset[3]
    numbers = list(range(0, len(dataset), 3))
    (tmp_path / "pickled").write_bytes(pickle.dumps((dataset, numbers)))
    assert (tmp_path / "pickled").stat().st_size < 20_000
    program = """if True:
        import json, pickle, sys
        dataset, numbers = pickle.load(open(sys.argv[1], "rb"))
        assert "torch" not in sys.modules
        print(json.dumps(dataset.get_batch(numbers).tokens.tolist()))
    """
    command = [sys.executable, "-c", program, str(tmp_path / "pickled")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dataset.get_batch(numbers).tokens.tolist()


@pytest.mark.parametrize(
    ("options", "filler", "eos"),
    [
        ({}, EOT, EOT),
        ({"pad_token_id": 7}, 7, EOT),
        ({"eos_token_id": 9}, 9, 9),
        ({"pad_token_id": None, "eos_token_id": None}, EOT, EOT),
        ({"pad_token_id": 0, "eos_token_id": 9}, 0, 9),
    ],
)
def test_default_filler_is_the_eot_of_the_tokenizer(cache, options, filler, eos):
    for dataset in (
        SpliceDocumentDataset.from_cache(cache, S=40, **options),
        MultiSpliceDocumentDataset.from_cache(cache, S=40, doc_indices=[0], **options),
    ):
        assert (dataset.pad_token_id, dataset.eos_token_id) == (filler, eos)
        assert dataset[0].tokens[0] == filler


def test_option_none_removes_a_limit_of_the_config(cache):
    config = SpliceMultiDocumentLMConfig(min_doc_length=20, num_docs=2)
    narrow = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config)
    assert min(narrow.lengths) >= 20
    wide = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config, min_doc_length=None, num_docs=7)
    assert sorted(wide.lengths) == [2, 8, 10, 17, 19, 26, 71]


def test_base_and_dataset_name_name_the_cache(tmp_path):
    folder = build(tmp_path / "caches" / "pretrain" / "notes")
    config = SpliceMultiDocumentLMConfig(num_docs=2, base=str(tmp_path / "caches"), dataset_name="notes")
    named = MultiSpliceDocumentDataset.from_cache(folder, S=S, config=config)
    assert named.dataset_name == "notes" and len(named.lengths) == 2
    for wrong in ({"dataset_name": "books"}, {"base": str(tmp_path)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MultiSpliceDocumentDataset.from_cache(folder, S=S, num_docs=2, **wrong)
    with pytest.raises(ValueError, match="cache_dir"):
        SpliceDocumentDataset.from_cache(S=S)


def test_shuffle_of_the_config_is_honoured(tmp_path):
    folder = build(tmp_path / "notes")
    for options in ({"shuffle": False}, {"shuffle_content": 3}):
        config = SpliceMultiDocumentLMConfig(num_docs=3, balance_mode="by_coverage", **options)
        dataset = MultiSpliceDocumentDataset.from_cache(folder, S=S, config=config)
        order = list(dataset.epoch(0, 0))
        assert (order == sorted(order)) == ("shuffle" in options)
        assert order == [i for step in range(len(order)) for i in dataset.plan(0, step, 1).indices.tolist()]


def test_a_document_by_its_text(tmp_path):
    """With a real folder of caches, whose tokenizer reads the text."""
    base, name = tmp_path / "caches", "notes"
    tokenizer = load_tokenizer(train_tokenizer(TEXTS * 20, base / "tokenizer", vocab_size=290))
    build(base / "pretrain" / name, tokenizer=tokenizer)
    for config, cls in ((SpliceSingleDocumentLMConfig, SpliceDocumentDataset),
                        (SpliceMultiDocumentLMConfig, MultiSpliceDocumentDataset)):  # fmt: skip
        several = {"num_docs": 1} if config is SpliceMultiDocumentLMConfig else {}
        chosen = config(base=str(base), dataset_name=name, doc_key="paragraphs", **several)
        dataset = cls.from_cache(config=chosen, S=S)
        assert len(dataset.lengths) == 1
        with pytest.raises(ValueError, match="doc_key"):
            cls.from_cache(config=config(base=str(base), dataset_name=name, doc_key="absent", **several), S=S)
    with pytest.raises(ValueError, match="doc_key"):
        SpliceSingleDocumentLMConfig(doc_key="x").select([3, 4])


def test_naming_the_cache_selects_no_documents(tmp_path):
    """`base`, `dataset_name` and `tokenizer` say where the documents are, not which."""
    cache = build(tmp_path / "pretrain" / "notes")
    every = list(range(len(TEXTS)))
    base, name = {"base": str(tmp_path)}, {"dataset_name": "notes"}
    for options in (base, name, base | name):
        assert MultiSpliceDocumentDataset.from_cache(cache, S=S, **options).documents.indices.tolist() == every
    both = MultiSpliceDocumentDataset.from_cache(cache, S=S, base=str(tmp_path), num_docs=2)
    assert both.documents.indices.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"doc_key": "a"}, ["doc_key"]),
        ({"num_docs": 10}, ["num_docs"]),
        ({"min_doc_length": 2, "doc_select_mode": "longest"}, ["min_doc_length", "doc_select_mode"]),
    ],
)
def test_doc_indices_beside_options_that_select_are_refused(cache, options, named):
    with pytest.raises(ValueError, match="doc_indices") as error:
        MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[0, 2], **options)
    assert all(name in str(error.value) for name in named)
    others = {"config": SpliceMultiDocumentLMConfig(content_length=4, seed=3), "dataset_name": cache.name}
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[0, 2], **others)
    assert dataset.documents.indices.tolist() == [0, 2]
