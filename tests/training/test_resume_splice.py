"""A splice run that crashes and resumes equals an uninterrupted one, bit for bit."""

import json
import shutil

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import CheckpointError, save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.loop import train
from niels_gpt.training.progress import Silent
from niels_gpt.training.resume import identity
from tests import token_caches
from tests.cache import no_waiting
from tests.training import same, sentence, weights_sha256

STEPS, EVERY = 12, 4
OPTIONS = [
    "task=splice",
    "model.T=32",
    "model.C=16",
    "model.L=2",
    "model.H=2",
    "model.dropout=0.2",
    f"train.total_steps={STEPS}",
    "train.warmup_steps=3",
    "train.base_lr=1e-2",
    "train.B=6",
    "train.seed=7",
    f"output.checkpoint_every={EVERY}",
    "output.keep=2",
    "output.eval_every=6",
    "output.sample_every=0",
    "output.sample_tokens=4",
    "data.roam_val_frac=0.3",
    "splice.num_docs=3",
    "splice.content_length=12",
    "splice.eval_examples=3",
]
KINDS = {
    "quotas": ["splice.balance_tau=0.5"],
    "stream": ["splice.sampler=stream", "splice.offset_jitter=4", "splice.curriculum=4", "model.positions=learned"],
    "sweep": ["splice.content_start_mode=slide_within", "splice.balance_mode=by_document", "splice.packed=false"],
}


class Crash(Exception):
    """Stands for a kill: nothing catches it."""


class CrashAt(Silent):
    """Ends the run abruptly after some steps."""

    def __init__(self, done):
        self.done = done

    def step(self, line):
        if line["step"] + 1 == self.done:
            raise Crash


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


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def full(folder, kind):
    """The uninterrupted run of a kind."""
    run = RunFolder(folder / "runs" / kind)
    result = train(config_of(folder, *KINDS[kind]), run)
    assert (result.step, result.stopped_by) == (STEPS, None)
    return run


def lines(run):
    """metrics.jsonl without the speeds, which differ between runs."""
    speeds = ("tokens_per_s", "supervised_per_s")
    return [{key: value for key, value in line.items() if key not in speeds} for line in run.metrics()]


def test_a_run_that_crashed_several_times(folder, kind, full, tmp_path):
    """Before the first checkpoint, between two, and right after one."""
    run = RunFolder(tmp_path / "run")
    config = config_of(folder, *KINDS[kind])
    for attempt, done in enumerate((3, 6, 9)):
        with pytest.raises(Crash):
            train(config, run, resume=attempt > 0, report=CrashAt(done))
    train(config, run, resume=True)
    assert lines(run) == lines(full)
    assert len(lines(run)) == STEPS
    assert weights_sha256(run.latest) == weights_sha256(full.latest)
    assert weights_sha256(run.best) == weights_sha256(full.best)
    assert same(torch.load(run.latest, weights_only=True), torch.load(full.latest, weights_only=True))


CHANGES = [
    ("splice.num_docs=2", "splice.num_docs was 3, is 2"),
    ("splice.content_length=11", "splice.content_length was 12, is 11"),
    ("splice.balance_tau=0.25", "splice.balance_tau was 0.5, is 0.25"),
    ("splice.curriculum=5", "splice.curriculum was None, is 5"),
    ("splice.doc_weights=[1, 2, 3]", r"splice.doc_weights was None, is \[1.0, 2.0, 3.0\]"),
    ("splice.doc_index=0", "splice.doc_index was None, is 0"),
    ("splice.packed=false", "splice.packed was None, is False"),
    ("model.positions=learned", "model.positions was 'rope', is 'learned'"),
]


@pytest.fixture(scope="module")
def stopped(folder):
    """A run that ended after its first checkpoint."""
    run = RunFolder(folder / "stopped")
    with pytest.raises(Crash):
        train(config_of(folder, *KINDS["quotas"]), run, report=CrashAt(EVERY + 1))
    return run


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_another_splice_section_is_rejected(folder, stopped, change, named):
    before = stopped.metrics()
    with pytest.raises(ValueError, match=named):
        train(config_of(folder, *KINDS["quotas"], change), stopped, resume=True)
    assert stopped.metrics() == before


def test_a_change_is_allowed_on_request(folder, stopped, tmp_path):
    run = RunFolder(shutil.copytree(stopped.path, tmp_path / "run"))
    changed = config_of(folder, *KINDS["quotas"], "splice.content_length=11")
    assert train(changed, run, resume=True, allow_config_change=True).step == STEPS


def test_other_documents_are_rejected(tmp_path):
    """The same config, but a note has changed."""
    (tmp_path / "notes").mkdir()
    for i in range(9):
        (tmp_path / "notes" / f"note_{i}.md").write_text(sentence(i, 5 + 2 * i), encoding="utf-8")
    run = RunFolder(tmp_path / "run")
    with pytest.raises(Crash):
        train(config_of(tmp_path), run, report=CrashAt(EVERY + 1))
    for path in (tmp_path / "notes").iterdir():
        path.write_text(path.read_text(encoding="utf-8") + " and more", encoding="utf-8")
    with pytest.raises(ValueError, match=r"training data has changed.*roam"):
        train(config_of(tmp_path), run, resume=True)
    assert train(config_of(tmp_path), run, resume=True, allow_data_change=True).step == STEPS


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
        train(token_config(root), run, report=CrashAt(EVERY + 1))
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
        train(config, RunFolder(tmp_path / "run"), report=CrashAt(1))


def test_doc_key_is_not_in_the_checkpoint():
    config = load_config(overrides=["task=splice", "splice.doc_key=a private phrase"])
    assert "private" not in json.dumps(identity(config))
    assert "num_docs" in json.dumps(identity(config))
