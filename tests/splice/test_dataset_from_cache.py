"""Documents that stay in a token cache, against datasets of the same documents as plain lists."""

import itertools
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
from niels_gpt.cache.meta import CacheError
from niels_gpt.splice import (
    MultiSpliceDocumentDataset,
    SpliceDocumentDataset,
    SpliceMultiDocumentLMConfig,
    SpliceSingleDocumentLMConfig,
)
from tests import token_caches
from tests.cache import EOT, UNLIMITED, ByteTokenizer, no_waiting, quick_folder
from tests.splice import CONTENT_MODES, NULL, check_dataset
from tests.splice import spans as naive_spans

TEXTS = ["once upon a time", "b", "two\n\nparagraphs of a note", "é 日本", "x" * 70, "the end", "once again, a note"]
"""With shards of 16 tokens documents end within shards and run over up to five of them. Lengths with their EOT: 17, 2,
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
    """The first token of each document, and the end of the last."""
    ends = [0]
    for ids in ids_of(texts):
        ends.append(ends[-1] + len(ids))
    return ends


def shards_of(numbers):
    """The shards that hold documents."""
    ends = starts_of()
    return {at // SHARD_TOKENS for i in numbers for at in range(ends[i], ends[i + 1])}


def keep_only(cache, numbers):
    """Take away all shards but these."""
    for path in (cache / "train").glob("shard_*.bin"):
        if int(path.stem.removeprefix("shard_")) not in numbers:
            path.unlink()


# --- the same tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CONTENT_MODES)
@pytest.mark.parametrize("number", [0, 2, 3, 4, 6])
def test_one_document_is_that_of_the_source(cache, mode, number):
    options = {"content_length": 7, "content_start_mode": mode, "content_stride": 2, "offset_stride": 2}
    dataset = SpliceDocumentDataset.from_cache(cache, S=S, doc_index=number, pad_token_id=NULL, **options)
    doc = ids_of()[number]
    wanted = [(0, *span) for span in naive_spans(S=S, L=len(doc), **options)]
    check_dataset(dataset, [doc], wanted, S)


@pytest.mark.parametrize("mode", CONTENT_MODES)
def test_documents_are_those_of_the_source(cache, mode):
    options = {"content_length": 9, "content_start_mode": mode, "offset_stride": 2}
    chosen = [4, 0, 6, 3]  # in any order
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=chosen, pad_token_id=NULL, **options)
    docs = [ids_of()[i] for i in chosen]
    assert dataset.lengths.tolist() == [len(doc) for doc in docs]
    wanted = [(n, *span) for n, doc in enumerate(docs) for span in naive_spans(S=S, L=len(doc), **options)]
    check_dataset(dataset, docs, wanted, S)


@settings(max_examples=30)
@given(
    st.lists(st.text("abé\n", min_size=1, max_size=30), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(2, 12),
    st.data(),
)
def test_any_cache_and_any_choice(texts, shard_tokens, frame, data):
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=6))
    with quick_folder() as folder:
        cache = build(folder / "cache", texts, shard_bytes=2 * shard_tokens)
        made = MultiSpliceDocumentDataset.from_cache(cache, "train", S=frame, doc_indices=chosen, pad_token_id=NULL)
        docs = [ids_of(texts)[i] for i in chosen]
        wanted = [(n, *span) for n, doc in enumerate(docs) for span in naive_spans(S=frame, L=len(doc))]
        check_dataset(made, docs, wanted, frame)


def test_without_a_choice_all_documents_are_taken(cache):
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, pad_token_id=NULL)
    assert dataset.lengths.tolist() == [17, 2, 26, 10, 71, 8, 19]
    plain = MultiSpliceDocumentDataset(S=S, doc_tokens_list=ids_of(), pad_token_id=NULL)
    assert len(dataset) == len(plain)
    found, wanted = (made.get_batch(np.arange(len(plain))) for made in (dataset, plain))
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert dataset.triples().tolist() == plain.triples().tolist()


def test_the_first_document_unless_another_is_named(cache):
    assert SpliceDocumentDataset.from_cache(cache, S=40)[0].tokens.tolist() == [EOT] * 23 + ids_of()[0]


def test_the_other_split(tmp_path):
    cache = build(tmp_path / "cache", max_val_tokens=19)
    held_out = MultiSpliceDocumentDataset.from_cache(cache, "val", S=20, pad_token_id=NULL)
    assert held_out.lengths.tolist() == [17, 2]
    assert held_out[1].tokens.tolist() == [NULL] * 18 + ids_of()[1]
    train = SpliceDocumentDataset.from_cache(str(cache), "train", S=30, doc_index=0)
    assert train[0].tokens.tolist() == [EOT] * 4 + ids_of()[2]


def test_real_tokens_of_a_real_tokenizer():
    """Several shards, the builder's own tokenizer, texts that end within shards."""
    place = token_caches.folder() / "pretrain" / "fineweb_edu"
    assert len(token_caches.shards("fineweb_edu")) > 2
    stream, ends = token_caches.stream("fineweb_edu"), token_caches.read_offsets(place / "train" / "documents.npy")
    ends.append(len(stream))
    dataset = MultiSpliceDocumentDataset.from_cache(place, S=64, content_length=20, pad_token_id=NULL)
    docs = [stream[a:b] for a, b in itertools.pairwise(ends)]
    texts = token_caches.documents("fineweb_edu")
    held_out = len(texts) - len(docs)  # those before: whole documents go to val first
    eot = token_caches.special("eot")
    assert docs == [[*token_caches.tokenizer().encode(text), eot] for text in texts[held_out:]]
    for i in np.random.default_rng(0).integers(0, len(dataset), 50).tolist():
        doc, t, s, length = dataset[i].origin
        assert dataset[i].tokens[s : s + length].tolist() == docs[doc][t : t + length]


# --- which documents ---------------------------------------------------------------------------------


def test_a_config_chooses_one_and_sets_the_rest(cache):
    config = SpliceSingleDocumentLMConfig(
        doc_select_mode="longest", max_doc_length=30, content_length=5, content_start_mode="anchor_start"
    )
    dataset = SpliceDocumentDataset.from_cache(cache, S=S, config=config, pad_token_id=NULL)
    wanted = [(0, 0, s, 5) for s in range(S - 5 + 1)]
    check_dataset(dataset, [ids_of()[2]], wanted, S)


def test_a_config_chooses_several_and_sets_the_rest(cache):
    config = SpliceMultiDocumentLMConfig(
        num_docs=3, doc_select_mode="longest", max_doc_length=30, content_length=6, balance_mode="by_document"
    )
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config, pad_token_id=NULL)
    assert dataset.lengths.tolist() == [26, 19, 17]
    assert dataset.quotas == [21, 21, 21]
    assert dataset[21].tokens[6:].tolist() == ids_of()[6][:6]


def test_options_may_choose_without_a_config(cache):
    options = {"num_docs": 3, "doc_select_mode": "longest", "max_doc_length": 30, "content_length": 6}
    dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, pad_token_id=NULL, **options)
    assert dataset.lengths.tolist() == [26, 19, 17]
    assert dataset.quotas == [21, 14, 12]  # the class's own balance mode: every span once
    subset = {"restrict_to_training_subset": True, "max_train_tokens": starts_of()[3], "num_docs": 3}
    dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, pad_token_id=NULL, **subset)
    assert sorted(dataset.lengths.tolist()) == sorted(len(doc) for doc in ids_of()[:3])
    one = SpliceDocumentDataset.from_cache(cache, "train", S=S, doc_select_mode="longest", max_doc_length=30)
    assert one.lengths.tolist() == [26]
    with pytest.raises(TypeError, match="num_documents"):
        MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, num_documents=3)


@pytest.mark.parametrize(
    "usual",
    [
        {"restrict_to_training_subset": False},
        {"shuffle": True},
        {"strict_num_docs": True},
        {"base": None, "dataset_name": None},
        {"min_doc_length": None, "max_train_tokens": None, "num_docs": None},
    ],
)
def test_an_option_with_its_default_value_chooses_nothing(cache, usual):
    dataset = MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, pad_token_id=NULL, **usual)
    assert dataset.lengths.tolist() == [len(doc) for doc in ids_of()]


@pytest.mark.parametrize("indices", [[1.7], ["1"], [[0, 1]], 5, [True], [[0], [1, 2]]])
def test_numbers_of_documents_that_are_none(cache, indices):
    with pytest.raises(ValueError, match="doc_indices must be a list of integers, got "):
        MultiSpliceDocumentDataset.from_cache(cache, "train", S=S, doc_indices=indices)


def test_a_config_may_name_filler_and_seed(cache):
    config = SpliceSingleDocumentLMConfig(doc_index=0, content_length=4, pad_token_id=NULL, seed=3, offset_jitter=2)
    made = SpliceDocumentDataset.from_cache(cache, S=S, config=config)
    by_hand = SpliceDocumentDataset(
        S=S, doc_tokens=ids_of()[0], content_length=4, pad_token_id=NULL, seed=3, offset_jitter=2
    )
    np.testing.assert_array_equal(made.get_batch(range(len(made))).tokens, by_hand.get_batch(range(len(made))).tokens)


def test_options_go_before_the_configs(cache):
    config = SpliceMultiDocumentLMConfig(num_docs=2, content_length=6, balance_mode="by_coverage")
    dataset = MultiSpliceDocumentDataset.from_cache(
        cache, S=S, config=config, pad_token_id=NULL, content_length=4, balance_mode="by_document"
    )
    assert set(dataset.get_batch([0, 5]).origin.length.tolist()) == {4}
    assert dataset.quotas == [68, 68]


def test_a_number_goes_before_the_choice_of_the_config(cache):
    """The config is for the rest then, in both classes."""
    one = SpliceSingleDocumentLMConfig(doc_select_mode="longest", content_length=5)
    single = SpliceDocumentDataset.from_cache(cache, S=S, doc_index=3, config=one)
    assert single.lengths.tolist() == [10]
    several = SpliceMultiDocumentLMConfig(num_docs=2, content_length=5)
    multi = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[3, 6], config=several)
    assert multi.lengths.tolist() == [10, 19]
    assert {single[0].origin.length, multi[0].origin.length} == {5}


@pytest.mark.parametrize(("budget", "inside"), [(16, 0), (17, 1), (44, 2), (45, 3), (54, 3), (55, 4), (126, 5)])
def test_the_training_subset_is_what_ends_within_it(cache, budget, inside):
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


def test_the_training_subset_in_batches_of_frames(cache):
    """3 batches of 5 frames of 12 tokens are 180: all; 1 of 5 is 60: the longest of the first four."""
    for batches, longest in ((3, 71), (1, 26)):
        config = SpliceSingleDocumentLMConfig(
            restrict_to_training_subset=True,
            max_train_batches=batches,
            initial_batch_size=5,
            doc_select_mode="longest",
        )
        assert SpliceDocumentDataset.from_cache(cache, S=12, config=config).lengths.tolist() == [longest]


def test_groups_by_source_or_length(cache):
    """Bins that double: 8 and 10 share one, 17, 19 and 26 another; each bin has the same share."""
    chosen = [5, 3, 0, 6, 2, 4]
    options = {"S": 4, "doc_indices": chosen, "balance_mode": "by_temperature", "balance_tau": 0.0}
    lengths = MultiSpliceDocumentDataset.from_cache(cache, groups="length", epoch_length=180, **options)
    assert lengths.quotas == [30, 30, 20, 20, 20, 60]
    alone = MultiSpliceDocumentDataset.from_cache(cache, groups="source", epoch_length=180, **options)
    assert alone.quotas == [30] * 6


# --- only what is needed is read ---------------------------------------------------------------------


def test_only_the_chosen_documents_are_read(cache):
    """The other shards could be gone."""
    chosen = [2, 5]
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=chosen, pad_token_id=NULL)
    keep_only(cache, shards_of(chosen))
    docs = [ids_of()[i] for i in chosen]
    wanted = [(n, *span) for n, doc in enumerate(docs) for span in naive_spans(S=S, L=len(doc))]
    check_dataset(dataset, docs, wanted, S)


def test_only_the_span_of_a_document_is_read(cache):
    """Document 4 begins at token 55, which is the eighth of shard 3: nine tokens of it lie there."""
    dataset = SpliceDocumentDataset.from_cache(cache, S=6, doc_index=4, pad_token_id=NULL)
    keep_only(cache, {3})
    assert dataset.get_batch(range(4)).tokens.tolist() == [ids_of()[4][t : t + 6] for t in range(4)]
    for number in (4, len(dataset) - 1):
        with pytest.raises(OSError, match="shard_"):
            dataset[number]


def test_nothing_is_read_before_it_is_asked_for(cache, monkeypatch):
    from niels_gpt.cache import mmap

    with monkeypatch.context() as patch:
        patch.setattr(mmap.MappedTokens, "tokens", property(lambda self: pytest.fail("a shard was mapped")))
        dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S)
        assert len(dataset) == sum(max(length - S + 1, 1) for length in (17, 2, 26, 10, 71, 8, 19))
        dataset.triples()
        list(dataset.epoch(0, 0))
    assert dataset[0].tokens.tolist() == ids_of()[0][:S]


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SpliceDocumentDataset, MultiSpliceDocumentDataset])
def test_a_cache_without_offsets_is_refused(cache, kind):
    (cache / "train" / "documents.npy").unlink()
    with pytest.raises(CacheError, match=r"documents\.npy is missing.*build the cache again") as err:
        kind.from_cache(cache, S=S)
    assert isinstance(err.value, ValueError)


@pytest.mark.parametrize("kind", [SpliceDocumentDataset, MultiSpliceDocumentDataset])
def test_places_that_are_no_cache_are_refused(cache, kind):
    with pytest.raises(CacheError, match="nowhere"):
        kind.from_cache(cache.parent / "nowhere", S=S)
    with pytest.raises(CacheError, match="test"):
        kind.from_cache(cache, "test", S=S)


@pytest.mark.parametrize(("chosen", "named"), [([7], "7"), ([0, 99], "99"), ([-1], "-1"), ([-1, 2], "-1")])
def test_a_number_that_is_no_document_is_named(cache, chosen, named):
    with pytest.raises(ValueError, match=rf"7 documents.*{named}\b"):
        MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=chosen)


@pytest.mark.parametrize("number", [7, 1000])
def test_one_document_that_is_none_is_named(cache, number):
    with pytest.raises(ValueError, match=rf"doc_index={number}, but there are 7"):
        SpliceDocumentDataset.from_cache(cache, S=S, doc_index=number)


def test_an_empty_choice_is_refused_in_words(cache):
    with pytest.raises(ValueError, match="no document"):
        MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[])


def test_a_split_without_documents_is_refused_in_words(cache):
    assert json.loads((cache / "meta.json").read_text(encoding="utf-8"))["val_tokens"] == 0
    for made in (SpliceDocumentDataset, MultiSpliceDocumentDataset):
        with pytest.raises(ValueError, match=r"no document|no folder of shards|no shards"):
            made.from_cache(cache, "val", S=S)


# --- other processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_a_pickled_dataset_reads_the_same_cache(cache, used):
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, doc_indices=[4, 2], pad_token_id=NULL)
    if used:
        dataset.get_batch(range(len(dataset)))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 20_000
    again = pickle.loads(pickled)
    numbers = list(range(len(dataset)))
    assert again.get_batch(numbers).tokens.tolist() == dataset.get_batch(numbers).tokens.tolist()
    assert again.triples().tolist() == dataset.triples().tolist()


def test_a_process_of_its_own(cache, tmp_path):
    """Started anew, as a loader with workers does on systems without fork. It needs numpy only."""
    dataset = MultiSpliceDocumentDataset.from_cache(cache, S=S, pad_token_id=NULL)
    dataset[3]
    numbers = list(range(0, len(dataset), 3))
    (tmp_path / "pickled").write_bytes(pickle.dumps((dataset, numbers)))
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


def test_the_folder_may_be_a_string_or_a_path(cache):
    for place in (str(cache), Path(cache)):
        assert SpliceDocumentDataset.from_cache(place, S=S)[0].tokens.tolist() == ids_of()[0][:S]


@pytest.mark.parametrize(
    ("chosen", "filler", "eos"),
    [
        ({}, EOT, EOT),
        ({"pad_token_id": 7}, 7, EOT),
        ({"eos_token_id": 9}, 9, 9),
        ({"pad_token_id": None, "eos_token_id": None}, EOT, EOT),
        ({"pad_token_id": 0, "eos_token_id": 9}, 0, 9),
    ],
)
def test_frames_are_filled_with_the_tokenizers_end_of_text(cache, chosen, filler, eos):
    for dataset in (
        SpliceDocumentDataset.from_cache(cache, S=40, **chosen),
        MultiSpliceDocumentDataset.from_cache(cache, S=40, doc_indices=[0], **chosen),
    ):
        assert (dataset.pad_token_id, dataset.eos_token_id) == (filler, eos)
        assert dataset[0].tokens[0] == filler


def test_a_limit_of_the_config_can_be_lifted(cache):
    config = SpliceMultiDocumentLMConfig(min_doc_length=20, num_docs=2)
    narrow = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config)
    assert min(narrow.lengths) >= 20
    wide = MultiSpliceDocumentDataset.from_cache(cache, S=S, config=config, min_doc_length=None, num_docs=7)
    assert sorted(wide.lengths) == [2, 8, 10, 17, 19, 26, 71]
