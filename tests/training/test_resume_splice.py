"""A splice run that crashes and resumes equals an uninterrupted one, bit for bit."""

import json

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import CheckpointError, save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.loop import train
from niels_gpt.training.resume import identity
from niels_gpt.training.tasks.documents import open_documents
from niels_gpt.training.tasks.splice_task import choose_documents
from tests import token_caches
from tests.cache import no_waiting
from tests.training import Crash, crash_at, same, sentence, weights_sha256

STEPS, EVERY = 8, 3
OPTIONS = [
    *["task=splice", "model.T=32", "model.C=16", "model.L=2", "model.H=2", "model.dropout=0.2"],
    *f"train.total_steps={STEPS} train.warmup_steps=3 train.base_lr=1e-2 train.B=6 train.seed=7".split(),
    *f"output.checkpoint_every={EVERY} output.keep=2 output.eval_every=4 output.sample_every=0".split(),
    *["output.sample_tokens=4", "data.roam_val_frac=0.3"],
    *["splice.num_docs=3", "splice.content_length=12", "splice.eval_examples=3"],
]
KINDS = {
    "quotas": ["splice.balance_tau=0.5"],
    "stream": ["splice.sampler=stream", "splice.offset_jitter=4", "splice.curriculum=4", "model.positions=learned"],
    "sweep": ["splice.content_start_mode=slide_within", "splice.balance_mode=by_document", "splice.packed=false"],
}


@pytest.fixture(autouse=True, scope="module")
def quick():
    with no_waiting():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "notes").mkdir()
    for i in range(9):
        (folder / "notes" / f"note_{i}.md").write_text(sentence(i, 5 + 2 * i), encoding="utf-8")
    return folder


def config_of(folder, *overrides):
    paths = [f"data.roam={folder / 'notes'}", f"data.cache_dir={folder / 'streams'}"]
    return load_config(None, overrides=[*OPTIONS, *paths, *overrides])


def lines(run):
    """metrics.jsonl without the speeds, which differ between runs."""
    speeds = ("tokens_per_s", "supervised_per_s")
    return [{key: value for key, value in line.items() if key not in speeds} for line in run.metrics()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_crashed_several_times(folder, kind, tmp_path):
    """Before the first checkpoint, and between two."""
    full, run = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "run")
    config = config_of(folder, *KINDS[kind])
    train(config, full)
    for done in (2, 5):
        with pytest.raises(Crash):
            train(config, run, resume=run.exists, report=crash_at(done))
    train(config, run, resume=True)
    assert lines(run) == lines(full)
    assert len(lines(run)) == STEPS
    assert weights_sha256(run.latest) == weights_sha256(full.latest)
    assert weights_sha256(run.best) == weights_sha256(full.best)
    assert same(torch.load(run.latest, weights_only=True), torch.load(full.latest, weights_only=True))


def test_another_splice_section_is_rejected_unless_allowed(folder, tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(Crash):
        train(config_of(folder), run, report=crash_at(EVERY + 1))
    changed = config_of(folder, "splice.content_length=11", "splice.doc_weights=[1, 2, 3]")
    named = r"splice.content_length was 12, is 11, splice.doc_weights was None, is \[1.0, 2.0, 3.0\]"
    with pytest.raises(ValueError, match=named):
        train(changed, run, resume=True)
    assert len(run.metrics()) == EVERY + 1
    assert train(changed, run, resume=True, allow_config_change=True).step == STEPS


@pytest.mark.parametrize("stored", [True, False])
def test_a_run_on_its_training_subset_can_be_extended(folder, tmp_path, stored):
    """The documents stay those of the first steps; also from a config without the stored batches."""
    options = [
        "splice.restrict_to_training_subset=true",
        "splice.num_docs=1",
        "train.total_steps=2",
        "train.B=2",
        "train.warmup_steps=1",
    ]
    config, run = config_of(folder, *options), RunFolder(tmp_path / "run")
    train(config, run)
    frozen = run.read_config().splice
    assert (frozen.max_train_batches, frozen.initial_batch_size) == (2, 2)
    longer = load_config(run.config_path, overrides=["train.total_steps=20"]) if stored else config_of(
        folder, *options, "train.total_steps=20"
    )  # fmt: skip
    assert choose_documents(config, open_documents(config)) != choose_documents(
        config_of(folder, *options, "train.total_steps=20"), open_documents(config)
    )
    assert train(longer, run, resume=True).step == 20
    assert (run.read_config().splice, run.read_config().train.total_steps) == (frozen, 20)


# --- token caches ------------------------------------------------------------------------------------


def token_config(root, *overrides):
    vocabulary = token_caches.tokenizer().vocab_size
    options = ["splice.documents=tokens", "splice.dataset_name=fineweb_edu", f"model.V={vocabulary}"]
    return load_config(None, overrides=[*OPTIONS, *options, f"splice.base={root}", "model.T=20", *overrides])


def test_a_checkpoint_holds_no_path_and_resumes_after_a_move(tmp_path):
    """It can be published, and the caches can be moved."""
    root = token_caches.copy_to(tmp_path / "my-secret-folder")
    run = RunFolder(tmp_path / "run")
    with pytest.raises(Crash):
        train(token_config(root), run, report=crash_at(EVERY + 1))
    saved = torch.load(run.latest, weights_only=True)
    saved.pop("model")
    saved.pop("optimizer")
    assert "my-secret-folder" not in json.dumps(saved, default=str)
    root.rename(tmp_path / "there")
    assert train(token_config(tmp_path / "there"), run, resume=True).step == STEPS


def test_weights_of_another_tokenizer_are_rejected(tmp_path):
    config = token_config(token_caches.folder(), f"init_from={tmp_path / 'start.pt'}")
    extra = {"data": {"tokenizer": token_caches.other_tokenizer().sha256}}
    save_checkpoint(tmp_path / "start.pt", GPT(config.model), None, 0, config.model, extra=extra)
    with pytest.raises(CheckpointError, match=r"start\.pt .*tokenizer"):
        train(config, RunFolder(tmp_path / "run"))
    extra = {"data": {"tokenizer": token_caches.tokenizer().sha256}}
    save_checkpoint(tmp_path / "start.pt", GPT(config.model), None, 0, config.model, extra=extra)
    with pytest.raises(Crash):
        train(config, RunFolder(tmp_path / "run"), report=crash_at(1))


def test_doc_key_is_not_in_the_checkpoint():
    config = load_config(overrides=["task=splice", "splice.doc_key=a private phrase"])
    assert "private" not in json.dumps(identity(config))
    assert "num_docs" in json.dumps(identity(config))
