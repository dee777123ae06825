"""The configs choose documents as the core does, from Levanter's caches and from this project's."""

import dataclasses
import json

import draccus
import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data.text import DatasetComponent, LmDataConfig, UrlDatasetSourceConfig
from levanter.schedule import BatchSchedule, ScheduleStep
from levanter.utils.hf_utils import byte_length_of_token

from niels_gpt.config import splice as core
from niels_gpt.levanter import (
    LMMixtureDatasetConfig,
    SpliceMultiDocumentLMConfig,
    SpliceSingleDocumentComponent,
    SpliceSingleDocumentLMConfig,
    TokenCacheConfig,
    UrlSingleDatasetLMConfig,
)
from niels_gpt.levanter.sources import ComponentsConfig
from niels_gpt.levanter.train_lm import TrainLmConfig, check_vocabulary, prepare
from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.tokenizer import load_tokenizer
from tests import token_caches
from tests.levanter import arrays, take, texts, word_ids, write_levanter_cache, write_word_tokenizer

POS = hax.Axis("position", 32)
IDS = [word_ids(text) for text in texts()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_word_tokenizer(tmp_path_factory.mktemp("tokenizer") / "words"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A mixture whose cache exists."""
    cache = write_levanter_cache(tmp_path_factory.mktemp("cache") / "notes", IDS)
    source = UrlDatasetSourceConfig(cache_dir=str(cache))
    return LMMixtureDatasetConfig(tokenizer=tokenizer, configs={"notes": source}, train_weights={"notes": 1.0})


def train_set(config, B=4, seed=7, **options):
    return config.train_set(POS, BatchSchedule(B), key=jax.random.PRNGKey(seed), **options)


SINGLE = """
data:
  type: splice_single_document
  base:
    type: url_single_dataset
    cache_dir: gs://.../tokenized/common_pile/wikimedia-...
    train_urls: [gs://.../wikimedia_filtered-...]
  dataset_name: common_pile/wikimedia
  doc_index: 12345
  # Placement
  offset_stride: 1
  # Content
  content_length: 3     # e.g., K=3; or null to use whole document
  content_stride: 1
  content_start_mode: slide_within
  mode: splice
  restrict_to_training_subset: true
  initial_batch_size: 128
"""
MULTI = """
data:
  type: splice_multi_document
  tokenizer: meta-llama/Meta-Llama-3.1-8B

  # Base dataset
  base:
    type: mixture
    tokenizer: meta-llama/Meta-Llama-3.1-8B
    configs:
      common_pile/wikimedia:
        cache_dir: gs://.../tokenized/common_pile/wikimedia-...
        train_urls: [gs://.../wikimedia_filtered-...]
        format: {text_key: text}
    train_weights: {common_pile/wikimedia: 1.0}
    shuffle: false
    shuffle_per_epoch: true

  dataset_name: common_pile/wikimedia

  # Multi-document selection
  num_docs: 10
  min_doc_length: 10000
  max_doc_length: 50000
  doc_select_mode: longest

  # Splice parameters
  content_length: 4096
  content_stride: 1
  content_start_mode: coverage_balanced
  min_copy_len: 128
  alpha: 0.8

  # Balancing (refined): temperature sampling over lengths
  balance_mode: by_temperature
  balance_tau: 0.7  # 1.0≈length-proportional, 0.0≈equal per doc

  # Optional absolute-position jitter (adds position diversity cheaply)
  offset_jitter: 2
  adaptive_k: true

  shuffle_per_epoch: true  # Infinite streaming
"""


def test_the_yaml_of_the_specification_is_taken_verbatim(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(SINGLE, encoding="utf-8")
    single = draccus.parse(TrainLmConfig, config_path=path, args=["--data.content_length", "5"]).data
    assert isinstance(single, SpliceSingleDocumentLMConfig) and isinstance(single.base, UrlSingleDatasetLMConfig)
    assert (single.content_length, single.doc_index, single.initial_batch_size) == (5, 12345, 128)
    path.write_text(MULTI, encoding="utf-8")
    multi = draccus.parse(TrainLmConfig, config_path=path, args=["--data.num_docs", "5"]).data
    assert isinstance(multi, SpliceMultiDocumentLMConfig) and isinstance(multi.base, LMMixtureDatasetConfig)
    assert (multi.num_docs, multi.alpha, multi.balance_tau, multi.offset_jitter) == (5, 0.8, 0.7, 2)
    source = multi.base.components["common_pile/wikimedia"]
    assert source.cache_dir.startswith("gs://") and source.format.text_key == "text"


def test_every_option_of_the_core_is_an_option_here():
    for ours, theirs in (
        (SpliceSingleDocumentLMConfig, core.SpliceSingleDocumentLMConfig),
        (SpliceMultiDocumentLMConfig, core.SpliceMultiDocumentLMConfig),
    ):
        assert issubclass(ours, LmDataConfig)
        assert {f.name for f in dataclasses.fields(theirs)} <= {f.name for f in dataclasses.fields(ours)}


def test_documents_of_a_levanter_cache(base):
    config = SpliceMultiDocumentLMConfig(base=base, num_docs=3, content_length=12, balance_mode="by_coverage")
    assert list(config.build_caches("train")) == ["notes"]
    assert config.chosen(32) == [4, 3, 2]
    expected = MultiSpliceDocumentDataset(
        S=32, doc_tokens_list=[IDS[i] for i in (4, 3, 2)], pad_token_id=18, eos_token_id=18, content_length=12, seed=7
    )
    tokens = arrays(take(train_set(config), range(4, 8)))[0]
    np.testing.assert_array_equal(tokens, expected.gather(expected.plan(7, 1, 4)).tokens)


def test_levanters_own_config_is_a_base_too(base, tokenizer):
    component = DatasetComponent(cache_dir=base.components["notes"].cache_dir)
    inside = SpliceSingleDocumentLMConfig(tokenizer=tokenizer, components={"notes": component})
    wrapped = SpliceSingleDocumentLMConfig(base=LmDataConfig(tokenizer=tokenizer, components={"notes": component}))
    assert inside.chosen(32) == wrapped.chosen(32) == [0]


def test_a_cache_is_built_from_files(tmp_path, tokenizer):
    lines = [json.dumps({"text": text}) for text in texts(3)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    single = UrlSingleDatasetLMConfig(cache_dir=str(tmp_path / "cache"), train_urls=[str(tmp_path / "notes.jsonl")])
    config = SpliceSingleDocumentLMConfig(
        tokenizer=tokenizer, base=single, dataset_name="my notes", doc_select_mode="longest", content_length=61
    )
    dataset = config.train_set(hax.Axis("position", 61), BatchSchedule(2), key=jax.random.PRNGKey(0))
    assert config.source.name == "my notes"
    assert arrays(take(dataset, [0]))[0].tolist() == [IDS[2]]


def test_documents_of_a_token_cache():
    config = SpliceMultiDocumentLMConfig(base=str(token_caches.folder()), dataset_name="roam", num_docs=2)
    vocabulary = token_caches.VOCAB_SIZE + 4
    assert isinstance(config.base, TokenCacheConfig)
    assert len(config.the_tokenizer) == config.source.vocabulary == vocabulary
    assert config.the_tokenizer.eos_token_id == config.source.filler["eos_token_id"]
    direct = MultiSpliceDocumentDataset.from_cache(
        token_caches.folder() / "pretrain" / "roam", S=32, config=core.SpliceMultiDocumentLMConfig(num_docs=2), seed=7
    )
    plan = direct.plan(7, 3, 4)
    np.testing.assert_array_equal(arrays(take(train_set(config), range(12, 16)))[0], direct.gather(plan).tokens)


def test_epochs_and_the_length_of_the_training_set(base):
    endless = SpliceSingleDocumentLMConfig(base=base)
    assert not train_set(endless).is_finite()
    n = len(train_set(endless).core)
    assert len(train_set(endless, epochs=3).as_sync_dataset()) == 3 * n
    assert len(train_set(dataclasses.replace(endless, epochs=2)).as_sync_dataset()) == 2 * n


def test_the_validation_set_is_a_fixed_grid(base):
    config = SpliceMultiDocumentLMConfig(base=base, num_docs=3, eval_examples=4)
    ((dataset, tags),) = config.tagged_eval_sets(POS)
    assert tags == ["notes"] and len(dataset.as_sync_dataset()) == 12
    assert dataclasses.replace(config, eval_examples=0).tagged_eval_sets(POS) == []


def test_documents_are_chosen_by_their_text(base):
    text = texts()[3]
    config = SpliceSingleDocumentLMConfig(base=base, doc_key=text[20:80])
    assert config.chosen(32) == [3]
    with pytest.raises(ValueError, match="doc_key: none of 5 documents"):
        dataclasses.replace(config, doc_key="xyzzy").chosen(32)
    with pytest.raises(ValueError, match="doc_index=1"):
        dataclasses.replace(config, doc_index=1).chosen(32)


def test_a_training_subset_counts_the_batches_of_the_run(base):
    config = SpliceSingleDocumentLMConfig(
        base=base, doc_select_mode="longest", restrict_to_training_subset=True, max_train_batches=1
    )
    train_set(config, B=4)  # 4 * 32 tokens: the documents have 41, 51, 61, ...
    assert config.chosen(32) == [1]
    config = dataclasses.replace(config, max_train_batches=None)
    config.fit_run(batch_size=4, steps=2)
    assert config.chosen(32) == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_docs": 9}, "data.num_docs=9"),
        ({"content_length": 1}, "data.content_length"),
        ({"balance_mode": "by_magic"}, "data.balance_mode"),
        ({"dataset_name": "mail"}, "data.dataset_name=mail.*notes"),
        ({"tokenizer": "another"}, "data.base.tokenizer"),
        ({"base": None}, "data.base"),
        ({"stop_strategy": "first"}, "data.stop_strategy has no effect"),
        ({"mixture_block_size": 7}, "data.mixture_block_size has no effect"),
        ({"components": {"x": DatasetComponent()}}, "both base and components"),
        ({"pad_token_id": 19}, "data.pad_token_id=19.*0..18"),
        ({"epochs": 0}, "data.epochs"),
        ({"restrict_to_training_subset": True}, "data.max_train"),
        ({"restrict_to_training_subset": True, "epochs": 2}, "data.epochs"),
        ({"curriculum": 3, "epochs": 2}, "data.curriculum"),
    ],
)
def test_bad_options_are_one_line(base, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        train_set(SpliceMultiDocumentLMConfig(**{"base": base, "num_docs": 3} | options))
    assert "\n" not in str(raised.value) and "splice." not in str(raised.value)


def test_options_of_the_order_reach_the_core(base):
    """Each start keeps its place; its offsets are permuted."""
    options = {"content_start_mode": "slide_within", "content_length": 12, "shuffle_offsets": 5}
    dataset = train_set(SpliceSingleDocumentLMConfig(base=base, **options))
    spans = dataset.core.spans(dataset.core.order(7, np.arange(21))[0])
    assert set(spans.t.tolist()) == {0} and sorted(spans.s.tolist()) == list(range(21)) != spans.s.tolist()
    np.testing.assert_array_equal(arrays(take(dataset, range(21)))[0], dataset.core.frames(spans).tokens)
    once = train_set(SpliceSingleDocumentLMConfig(base=base, shuffle_per_epoch=False))
    n = len(once.core)
    tokens = arrays(take(once, range(2 * n)))[0]
    np.testing.assert_array_equal(tokens[:n], tokens[n:])


def test_a_curriculum_needs_one_batch_size(base):
    config = SpliceMultiDocumentLMConfig(base=base, num_docs=3, curriculum=2)
    assert train_set(config).batch_size == 4
    growing = BatchSchedule([ScheduleStep(start=0, value=4), ScheduleStep(start=5, value=8)])
    with pytest.raises(ValueError, match=r"data\.curriculum"):
        config.train_set(POS, growing, key=jax.random.PRNGKey(0))


def test_ids_past_the_vocabulary_are_refused(tmp_path, tokenizer):
    cache = write_levanter_cache(tmp_path / "other", [[*range(60)]])
    source = UrlDatasetSourceConfig(cache_dir=str(cache))
    config = SpliceSingleDocumentLMConfig(base=LMMixtureDatasetConfig(tokenizer=tokenizer, configs={"a": source}))
    with pytest.raises(ValueError, match=r"ids 0\.\.59, but the tokenizer has 19"):
        train_set(config)


def test_vocabularies_of_data_and_model_must_agree(base, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer has 19 ids, but the token cache roam .* has 404"):
        train_set(
            SpliceSingleDocumentLMConfig(
                base=TokenCacheConfig(path=str(token_caches.folder())), dataset_name="roam", tokenizer=tokenizer
            )
        )
    config = TrainLmConfig(data=SpliceSingleDocumentLMConfig(base=base))
    prepare(config)
    assert config.model.tokenizer == tokenizer and config.data_seed == config.trainer.seed
    with pytest.raises(ValueError, match=r"404 token ids.*has 19"):
        check_vocabulary(config, 404)


def test_an_option_of_a_base_is_refused_where_it_has_no_effect(base):
    with pytest.raises(ValueError, match=r"data\.shuffle_per_epoch"):
        prepare(TrainLmConfig(data=dataclasses.replace(base, configs={}, shuffle_per_epoch=True)))


def test_components_have_the_vocabulary_of_the_data(base, tokenizer):
    own = SpliceSingleDocumentComponent(base=base, seq_len=32)
    cache = SpliceSingleDocumentComponent(base=str(token_caches.folder()), dataset_name="roam", seq_len=32)
    config = TrainLmConfig(data=ComponentsConfig(tokenizer=tokenizer, components={"own": own}))
    prepare(config)
    assert config.model.tokenizer == tokenizer
    config.data = ComponentsConfig(tokenizer=tokenizer, components={"own": own, "cache": cache})
    with pytest.raises(ValueError, match=r"19 token ids.*data\.components\.cache have 404"):
        prepare(config)


def test_initial_weights_have_the_vocabulary_of_the_data(base, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 23}), encoding="utf-8")
    write_word_tokenizer(tmp_path)
    config = TrainLmConfig(data=SpliceSingleDocumentLMConfig(base=base), initialize_from_hf=str(tmp_path))
    with pytest.raises(ValueError, match=r"19 token ids.*has 23"):
        prepare(config)


def test_a_cache_of_another_tokenizer_is_refused(tmp_path, tokenizer):
    lines = [json.dumps({"text": text}) for text in texts(3)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    single = UrlSingleDatasetLMConfig(cache_dir=str(tmp_path / "cache"), train_urls=[str(tmp_path / "notes.jsonl")])
    train_set(SpliceSingleDocumentLMConfig(tokenizer=tokenizer, base=single))
    other = str(write_word_tokenizer(tmp_path / "other", extra=["another", "word"]))
    with pytest.raises(ValueError, match=r"19 ids, but .*other has 21"):
        train_set(SpliceSingleDocumentLMConfig(tokenizer=other, base=single))


def test_a_missing_file_is_one_line(tmp_path, tokenizer):
    single = UrlSingleDatasetLMConfig(cache_dir=str(tmp_path / "cache"), train_urls=[str(tmp_path / "missing.jsonl")])
    with pytest.raises(ValueError, match=r"missing\.jsonl") as raised:
        train_set(SpliceSingleDocumentLMConfig(tokenizer=tokenizer, base=single))
    assert "\n" not in str(raised.value)


def test_levanter_knows_the_bytes_of_every_id_of_a_token_cache():
    """It computes bits per byte from them."""
    config = SpliceSingleDocumentLMConfig(base=str(token_caches.folder()), dataset_name="roam")
    tokenizer = load_tokenizer(token_caches.folder() / "tokenizer" / "spm.model")
    special = set(tokenizer.special_token_ids().values())
    wanted = [0 if i in special else len(data) for i, data in enumerate(tokenizer.token_bytes)]
    assert [byte_length_of_token(config.the_tokenizer, i) for i in range(tokenizer.vocab_size)] == wanted


def test_epochs_set_the_number_of_steps(base, capsys):
    config = TrainLmConfig(data=SpliceSingleDocumentLMConfig(base=base, epochs=3))
    config.trainer = dataclasses.replace(config.trainer, train_batch_size=4)
    config.train_seq_len = 32
    prepare(config)
    # 41 tokens have 10 spans of 32: 30 examples, 8 batches of 4.
    assert config.trainer.num_train_steps == 8
    assert "num_train_steps=8" in capsys.readouterr().out
