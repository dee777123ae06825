"""Runs whose number of steps changes while they are resumed: `train --resume --steps N`."""

import dataclasses
import shutil

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.loop import train
from niels_gpt.training.optim.schedule import scheduled_lr
from tests.training import Crash, crash_at, metric_lines, same, small_config, weights_sha256
from tests.training.worlds import Notes


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    run = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    train(small_config(texts), run)  # 12 steps, checkpoints every 4
    return run


@pytest.fixture
def copy(finished, tmp_path):
    def make(name):
        shutil.copytree(finished.path, tmp_path / name)
        return RunFolder(tmp_path / name)

    return make


def longer(run, steps):
    """The stored config with another number of steps, as `train --resume --steps N` reads it."""
    return load_config(run.config_path, overrides=[f"train.total_steps={steps}"])


def check_same(run, other):
    assert metric_lines(run.path) == metric_lines(other.path)
    assert weights_sha256(run.latest) == weights_sha256(other.latest)
    assert same(torch.load(run.latest, weights_only=True), torch.load(other.latest, weights_only=True))
    assert run.read_config() == other.read_config()


def test_a_finished_run_is_extended(finished, copy):
    run = copy("run")
    notes = Notes()
    assert train(longer(run, 40), run, resume=True, report=notes).step == 40
    lines = metric_lines(run.path)
    assert lines[:12] == metric_lines(finished.path)
    config = run.read_config()
    assert (config.train.total_steps, config.train.extended) == (40, ((12, 12),))
    assert [line["lr"] for line in lines] == [scheduled_lr(step, config.train) for step in range(40)]
    assert torch.load(run.latest, weights_only=True)["extra"]["config"]["train"]["extended"] == [[12, 12]]
    assert any("12 steps become 40" in text for text in notes.texts)


@pytest.mark.parametrize("crash", [14, 19, 30])  # before the first checkpoint of the extension, and after it
def test_an_interrupted_extension_equals_an_uninterrupted_one(copy, crash):
    full, run = copy("full"), copy("run")
    train(longer(full, 40), full, resume=True)
    with pytest.raises(Crash):
        train(longer(run, 40), run, resume=True, report=crash_at(crash))
    train(run.read_config(), run, resume=True)
    check_same(run, full)


def test_the_same_command_again_continues_the_extension(copy):
    full, run = copy("full"), copy("run")
    train(longer(full, 40), full, resume=True)
    for crash in (14, 20):
        with pytest.raises(Crash):
            train(longer(run, 40), run, resume=True, report=crash_at(crash))
    train(longer(run, 40), run, resume=True)
    check_same(run, full)


def test_a_second_extension_and_an_older_checkpoint(copy):
    """Damaged new checkpoints lead back before an extension: every step has the learning rate that it had."""
    full, run = copy("full"), copy("run")
    for folder in (full, run):
        train(longer(folder, 20), folder, resume=True)
    train(longer(full, 30), full, resume=True)
    assert full.read_config().train.extended == ((12, 12), (20, 20))
    with pytest.raises(Crash):
        train(longer(run, 30), run, resume=True, report=crash_at(22))
    for path in run.step_files()[:1]:
        path.write_bytes(b"damaged")
    run.latest.write_bytes(b"damaged")
    train(run.read_config(), run, resume=True)
    lines, expected = (
        [(line["step"], line["lr"], line["loss"]) for line in metric_lines(folder.path)] for folder in (run, full)
    )
    assert lines == expected  # step 20 was evaluated as the last step before; now it is a step like others
    assert weights_sha256(run.latest) == weights_sha256(full.latest)


def test_the_file_of_the_run_with_more_steps_extends_it_too(texts, finished, copy):
    """The config file does not know the history, and a warm-up that it does not set stays that of the run."""
    run = copy("run")
    config = small_config(texts, "train.total_steps=24")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, warmup_steps=2))  # the default of 24
    train(config, run, resume=True)
    again = small_config(texts, "train.total_steps=30")
    again = dataclasses.replace(again, train=dataclasses.replace(again.train, warmup_steps=3))  # the default of 30
    train(again, run, resume=True)
    assert run.read_config().train.extended == ((12, 12), (24, 24))
    assert run.read_config().train.warmup_steps == 2


def test_fewer_steps_than_are_done_is_an_error(copy):
    run = copy("run")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"done 12 steps.*total_steps=8"):
        train(longer(run, 8), run, resume=True)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_that_is_cut_short(texts, copy, tmp_path):
    run = RunFolder(tmp_path / "short")
    with pytest.raises(Crash):
        train(small_config(texts), run, report=crash_at(6))
    assert train(longer(run, 8), run, resume=True).step == 8
    lines = metric_lines(run.path)
    assert [line["step"] for line in lines] == list(range(8))
    assert lines[-1]["lr"] == pytest.approx(run.read_config().train.min_lr)


def test_a_finished_run_says_how_to_continue(copy):
    notes = Notes()
    run = copy("run")
    train(run.read_config(), run, resume=True, report=notes)
    assert any("--steps" in text for text in notes.texts)
