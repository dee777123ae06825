"""Runs with train.lora: what is trained, what is saved, and resuming bit for bit."""

import dataclasses
import shutil
import signal

import pytest
import torch

from niels_gpt.config import LoRAConfig
from niels_gpt.runs.checkpoint import CheckpointError, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from niels_gpt.training.loop import train
from tests.training import metric_lines, same, small_config, worlds
from tests.training.worlds import KILLED, run_world

STEPS = ["model.dropout=0.2", "train.total_steps=8", "output.checkpoint_every=3", "output.eval_every=3"]
LORA = ["train.lora.rank=2", "train.base_lr=0.01"]


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    """A run of two steps, trained from random weights."""
    run = RunFolder(tmp_path_factory.mktemp("base") / "run")
    train(small_config(texts, "train.total_steps=2", "train.warmup_steps=1"), run)
    return run


@pytest.fixture(scope="module")
def config(texts, base):
    return small_config(texts, *STEPS, *LORA, f"init_from={base.best}")


@pytest.fixture(scope="module")
def tuned(config, tmp_path_factory):
    run = RunFolder(tmp_path_factory.mktemp("tuned") / "run")
    train(config, run)
    return run


def test_a_checkpoint_holds_adapters_and_their_optimizer_state(base, tuned):
    saved = torch.load(tuned.latest, weights_only=True)
    assert saved["model"]
    assert all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in saved["model"])
    assert len(saved["optimizer"]["state"]) == len(saved["model"])
    assert tuned.latest.stat().st_size < base.latest.stat().st_size / 3
    assert same(read_checkpoint(tuned.base, "cpu")["model"], read_checkpoint(base.best, "cpu")["model"])


def test_reading_a_checkpoint_merges_it(base, tuned):
    before, after = (load_run(run.path, device="cpu").model.state_dict() for run in (base, tuned))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".attn." in name or ".mlp." in name}
    saved = torch.load(tuned.best, weights_only=True)["model"]
    name = "blocks.0.attn.qkv"
    sum_ = before[f"{name}.weight"] + 2.0 * saved[f"{name}.lora_B"] @ saved[f"{name}.lora_A"]
    torch.testing.assert_close(after[f"{name}.weight"], sum_)


def test_the_run_needs_nothing_of_the_base_run(config, texts, base, tmp_path):
    moved = RunFolder(shutil.copytree(base.path, tmp_path / "base"))
    run = RunFolder(tmp_path / "run")
    stop = dataclasses.replace(config, init_from=str(moved.best))
    assert run_world(1, worlds.stop, stop, run.path, 4, 0, signal.SIGTERM) == [(5, "SIGTERM")]
    shutil.rmtree(moved.path)
    assert train(stop, run, resume=True).step == 8
    load_run(run.path, device="cpu")


@pytest.mark.parametrize("at", [2, 5])  # before the first checkpoint, and after it
def test_a_killed_run_resumes_bit_for_bit(config, tuned, at, tmp_path):
    run = RunFolder(tmp_path / "run")
    assert run_world(1, worlds.stop, config, run.path, at, 0, signal.SIGKILL) == [KILLED]
    assert train(config, run, resume=True).step == 8
    assert metric_lines(run.path) == metric_lines(tuned.path)
    for file in ("latest.pt", "best.pt", "base.pt"):
        ours, theirs = (torch.load(each.checkpoints / file, weights_only=True) for each in (run, tuned))
        assert same(ours, theirs)


def test_two_processes_resume_bit_for_bit_and_agree_with_one(config, tuned, tmp_path):
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    one, two, stopped = (RunFolder(tmp_path / name) for name in ("one", "two", "stopped"))
    train(config, one)
    run_world(2, worlds.train_all, [(config, two.path, {})])
    assert run_world(2, worlds.stop, config, stopped.path, 5) == [(6, "SIGTERM")] * 2
    run_world(2, worlds.train_all, [(config, stopped.path, {"resume": True})])
    assert metric_lines(stopped.path) == metric_lines(two.path)
    ours, theirs, single = (torch.load(run.latest, weights_only=True)["model"] for run in (stopped, two, one))
    assert same(ours, theirs)
    for name, weight in single.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-3, atol=1e-5)


def test_micro_batches_change_only_rounding(config, tmp_path):
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    whole, split = (RunFolder(tmp_path / name) for name in ("whole", "split"))
    train(config, whole)
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2)), split)
    losses = [[line["loss"] for line in run.metrics()] for run in (whole, split)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_second_run_starts_from_the_merged_weights(config, tuned, tmp_path):
    run = RunFolder(tmp_path / "run")
    train(dataclasses.replace(config, init_from=str(tuned.best)), run)
    assert same(read_checkpoint(run.base, "cpu")["model"], read_checkpoint(tuned.best, "cpu")["model"])


def test_other_adapters_do_not_resume(config, tuned, tmp_path):
    run = RunFolder(shutil.copytree(tuned.path, tmp_path / "run"))
    for lora in (LoRAConfig(rank=3), LoRAConfig(rank=2, alpha=1.0), LoRAConfig()):
        other = dataclasses.replace(config, train=dataclasses.replace(config.train, lora=lora, total_steps=9))
        with pytest.raises(ValueError, match=r"train\.lora\."):
            train(other, run, resume=True, allow_config_change=True)


def test_random_weights_are_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"train\.lora\.rank=2.*init_from"):
        train(dataclasses.replace(config, init_from=""), tmp_path / "run")
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_checkpoint_without_its_base(tuned, base, tmp_path):
    shutil.copy(tuned.best, tmp_path / "best.pt")
    with pytest.raises(CheckpointError, match=r"base\.pt"):
        read_checkpoint(tmp_path / "best.pt", "cpu")
    shutil.copy(base.best, tmp_path / "base.pt")
    with pytest.raises(CheckpointError, match=r"base\.pt .*best\.pt"):
        read_checkpoint(tmp_path / "best.pt", "cpu")
    shutil.copy(tuned.base, tmp_path / "base.pt")
    assert same(read_checkpoint(tmp_path / "best.pt", "cpu")["model"], read_checkpoint(tuned.best, "cpu")["model"])


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["model"].pop("blocks.0.attn.qkv.lora_A"),
        lambda saved: saved["model"].update({"blocks.9.attn.qkv.lora_A": torch.zeros(2, 3)}),
        lambda saved: saved["model"].update({"norm.lora_A": torch.zeros(2, 3), "norm.lora_B": torch.zeros(3, 2)}),
        lambda saved: saved["model"].update({"blocks.0.attn.qkv.lora_A": torch.zeros(2, 3)}),
        lambda saved: saved["model"].update({"blocks.0.attn.qkv.lora_B": "text"}),
        lambda saved: saved["extra"].update(lora={"scale": "2"}),
        lambda saved: saved["extra"].update(lora=None),
        lambda saved: saved.update(model=[1]),
    ],
)
def test_damaged_adapters_are_refused(tuned, change, tmp_path):
    saved = torch.load(tuned.best, weights_only=True)
    change(saved)
    torch.save(saved, tmp_path / "best.pt")
    shutil.copy(tuned.base, tmp_path / "base.pt")
    with pytest.raises(CheckpointError, match=r"best\.pt"):
        read_checkpoint(tmp_path / "best.pt", "cpu")
