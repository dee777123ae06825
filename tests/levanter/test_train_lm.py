"""Runs of a two-layer Llama on the CPU, through the entry points."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from niels_gpt.config.yaml_file import load_config
from niels_gpt.levanter import train_lm
from niels_gpt.levanter.hf_checkpoint import convert
from niels_gpt.memorization.measure import Document, ExtractionSettings, measure
from niels_gpt.runs.loading import load_run
from niels_gpt.training.tasks.splice_task import SpliceTask
from tests import token_caches
from tests.levanter import (
    arrays,
    parse_losses,
    run_config,
    take,
    texts,
    train,
    word_ids,
    write_config,
    write_levanter_cache,
    write_word_tokenizer,
)

CACHES = token_caches.folder()
ROAM = {"base": {"type": "token_cache", "path": str(CACHES)}, "dataset_name": "roam"}
MULTI = {"type": "splice_multi_document", **ROAM, "num_docs": 3, "content_length": 48, "offset_jitter": 4}


@pytest.fixture(scope="module")
def multi(tmp_path_factory):
    """(config, loss by step) of a run on two documents."""
    folder = tmp_path_factory.mktemp("multi")
    path = write_config(folder / "config.yaml", run_config(folder, MULTI))
    return path, train(path, "--data.num_docs", "2")


def in_new_process(module, config, *overrides, **environment):
    """Loss by step of a run in a process with its own JAX."""
    result = subprocess.run(
        [sys.executable, *module, str(config), *overrides],
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return parse_losses(result.stderr.splitlines())


def test_a_document_is_memorized_and_its_p_z_reported(tmp_path):
    data = {"type": "splice_single_document", **ROAM, "doc_select_mode": "longest", "eval_examples": 2}
    config = run_config(tmp_path, data, trainer={"num_train_steps": 70}, hf_save_path=str(tmp_path / "hf"))
    losses = train(write_config(tmp_path / "config.yaml", config))
    assert losses[min(losses)] > 4 and losses[69] < 0.1
    # The export, computed by this project: same logits as transformers, and P(z) of the document above a control's.
    (exported,) = (tmp_path / "hf" / "run").glob("step-*")
    convert(exported, tmp_path / "model.pt", CACHES / "tokenizer" / "spm.model")
    loaded = load_run(tmp_path / "model.pt", device="cpu")
    ids = torch.randint(loaded.model.config.V, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        peer = LlamaForCausalLM.from_pretrained(exported).eval()(ids).logits
        assert (loaded.model(ids) - peer).abs().max() < 1e-4
    task = SpliceTask(_torch_config())
    train_ids = [task.documents.train.ids(i).astype(np.int64) for i in (3, 0)]
    documents = [Document("trained", train_ids[0]), Document("other", train_ids[1], control=True)]
    known, other = measure(loaded.model, documents, loaded.tokenizer, ExtractionSettings(32, 16, 4, greedy=8))
    assert known.p.max() > 0.5 and other.p.max() < 1e-6


def _torch_config():
    options = ["task=splice", "splice.documents=tokens", f"data.token_cache={CACHES}", "splice.dataset_name=roam"]
    options += ["splice.num_docs=3", "splice.content_length=48", "splice.offset_jitter=4", "splice.controls=0"]
    options += ["model.T=64", "model.C=16", "model.H=2", "model.L=1", f"model.V={token_caches.VOCAB_SIZE + 4}"]
    return load_config(None, overrides=[*options, "train.B=8", "train.seed=11", "splice.packed=false"])


def test_the_torch_loop_and_levanter_see_the_same_examples(tmp_path):
    """One seed, compared array by array: what the loop trains on, and what the loader of the run yields."""
    import draccus
    import jax.random as jrandom

    path = write_config(tmp_path / "config.yaml", run_config(tmp_path, MULTI))
    config = draccus.parse(train_lm.TrainLmConfig, config_path=path, args=[])
    train_lm.prepare(config)
    assert config.data_seed == 11
    dataset = config.data.train_set(
        config.model.max_Pos, config.trainer.batch_schedule, key=jrandom.PRNGKey(config.data_seed)
    )
    task = SpliceTask(_torch_config())
    for step in (0, 1, 7, 100):
        tokens, weights, segments = arrays(take(dataset, range(8 * step, 8 * step + 8)))
        batch = task.batch(step)
        np.testing.assert_array_equal(tokens, batch.x.numpy())
        np.testing.assert_array_equal(weights > 0, batch.targets.numpy() >= 0)
        np.testing.assert_array_equal(
            tokens[:, 1:][weights[:, :-1] > 0], batch.targets.numpy()[batch.targets.numpy() >= 0]
        )
        frames = task.dataset.frames(task.spans(step))
        np.testing.assert_array_equal(segments, frames.segment_ids)


def test_several_documents_train(multi):
    losses = multi[1]
    assert max(losses) == 11 and losses[11] < losses[min(losses)] - 1


def test_a_resumed_run_continues(multi, tmp_path):
    path = write_config(tmp_path / "config.yaml", run_config(tmp_path, MULTI))
    straight = multi[1]
    first = train(path, "--data.num_docs", "2", "--trainer.num_train_steps", "6")
    rest = train(path, "--data.num_docs", "2")
    assert max(first) == 5 and min(rest) >= 6 and max(rest) == 11
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(straight[step], abs=1e-5)


def test_one_and_four_devices_agree(multi, tmp_path):
    path, losses = multi
    four = in_new_process(
        ["-m", "niels_gpt.levanter.train_lm"],
        path,
        *("--data.num_docs", "2", "--trainer.id", "four"),
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert sorted(four) == sorted(losses)
    for step, loss in four.items():
        assert loss == pytest.approx(losses[step], abs=1e-4)


def test_splice_data_mixes_with_plain_data_in_the_stock_command(tmp_path):
    tokenizer = str(write_word_tokenizer(tmp_path / "words"))
    caches = [write_levanter_cache(tmp_path / name, [word_ids(t) for t in texts()]) for name in ("plain", "notes")]
    base = {"tokenizer": tokenizer, "components": {"notes": {"cache_dir": str(caches[1])}}}
    splice = {"type": "splice_multi_document", "base": base, "num_docs": 2, "seq_len": 64, "eval_examples": 0}
    plain = {"cache_dir": str(caches[0] / "train"), "flat_cache": True}  # without it, a validation cache must exist
    components = {"plain": plain, "spliced": splice}
    config = run_config(tmp_path, {"tokenizer": tokenizer, "components": components, "mixture_block_size": 8})
    config["data"]["train_weights"] = {"plain": 0.5, "spliced": 0.5}
    config["model"]["tokenizer"] = tokenizer
    stock = "import runpy, niels_gpt.levanter; runpy.run_module('levanter.main.train_lm', run_name='__main__')"
    path = write_config(tmp_path / "config.yaml", config)
    losses = in_new_process(["-c", stock, "--config_path"], path, "--trainer.num_train_steps", "8")
    assert losses[min(losses)] > 2 and losses[7] < losses[min(losses)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**MULTI, "num_docs": 99}, "data.num_docs=99"),
        ({**MULTI, "base": {"type": "token_cache", "path": "/nowhere"}}, "/nowhere"),
        ({**MULTI, "no_such": 1}, "no_such"),
        ({**MULTI, "num_docs": 0}, "data.num_docs"),
        ({**MULTI, "epochs": 0.5}, "data.epochs"),
        ({**MULTI, "type": "splice_many"}, "splice_multi_document"),
        ({**MULTI, "base": {"type": "token_caches"}}, "token_cache"),
        ({**MULTI, "base": {"type": "token_cache"}}, "data.base.path"),
        ({**MULTI, "tokenizer": "/no/such/folder"}, "data.tokenizer=/no/such/folder"),
        ({"tokenizer": "/no/such/folder"}, "data.tokenizer=/no/such/folder"),
    ],
)
def test_errors_of_a_run_are_one_line(tmp_path, data, message):
    with pytest.raises(SystemExit) as raised:
        train(write_config(tmp_path / "config.yaml", run_config(tmp_path, data)))
    assert message in raised.value.code and "\n" not in raised.value.code
