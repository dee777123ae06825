"""Processes that are really killed: the resumed run equals an uninterrupted one, bit for bit."""

import re
import shlex
import signal
from pathlib import Path

import pytest
import torch

from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import dump_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.loop import train
from niels_gpt.training.tasks.byte_task import ByteTask
from tests import token_caches
from tests.training import metric_lines, same, small_config, weights_sha256, worlds, write_texts
from tests.training.worlds import KILLED, run_world

STEPS = ["model.dropout=0.2", "train.total_steps=12", "output.checkpoint_every=4", "output.eval_every=3"]


def config_of(kind, folder):
    if kind == "bytes":
        return small_config(write_texts(folder / "data"), *STEPS)
    start = [f"init_from={folder / 'start.pt'}"] if kind == "sft" else []
    config = token_caches.small_config(kind, *STEPS, *start)
    torch.manual_seed(11)
    save_checkpoint(folder / "start.pt", GPT(config.model), None, 0, config.model)
    return config


def check_same(run, full):
    assert metric_lines(run.path) == metric_lines(full.path)  # every loss of every step, bit for bit
    assert weights_sha256(run.best) == weights_sha256(full.best)
    assert same(torch.load(run.latest, weights_only=True), torch.load(full.latest, weights_only=True))
    if full.tokenizer_path.exists():
        assert run.tokenizer_path.read_bytes() == full.tokenizer_path.read_bytes()
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("bytes", [2, 6]), ("sft", [6])],  # before the first checkpoint, and after it
)
def test_sigkill_while_training(kind, steps, tmp_path):
    config = config_of(kind, tmp_path)
    full, run = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "run")
    train(config, full)
    for step in steps:
        assert run_world(1, worlds.stop, config, run.path, step, 0, signal.SIGKILL) == [KILLED]
        assert len(run.metrics()) == step
        assert run.latest.exists() == (step > 4)
    assert train(config, run, resume=True).step == 12
    check_same(run, full)


def test_sigkill_between_a_checkpoint_and_the_move_of_latest(tmp_path):
    config = config_of("bytes", tmp_path)
    full, run = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "run")
    train(config, full)
    assert run_world(1, worlds.kill_before_latest, config, run.path, 8) == [KILLED]
    assert run.step_path(8).exists()
    assert torch.load(run.latest, weights_only=True)["step"] == 4
    notes = worlds.Notes()
    train(config, run, resume=True, report=notes)
    assert any("at step 4" in note for note in notes.texts)
    check_same(run, full)


def test_ctrl_c_and_sigterm_save_and_print_the_command_to_resume(tmp_path, monkeypatch, capsys):
    """The printed command, typed as it is, continues the run."""
    monkeypatch.chdir(tmp_path)
    write_texts(Path("data"))
    Path("c.yaml").write_text(dump_config(small_config(Path("data"), *STEPS)), encoding="utf-8")
    batch, stops = ByteTask.batch, {3: signal.SIGINT, 7: signal.SIGTERM}

    def stopping(self, step, *share):
        if step in stops:
            signal.raise_signal(stops.pop(step))
        return batch(self, step, *share)

    monkeypatch.setattr(ByteTask, "batch", stopping)
    run, arguments = RunFolder("my run"), ["train", "--config", "c.yaml", "--run-dir", "my run"]
    for done, name, code in ((4, "SIGINT", 130), (8, "SIGTERM", 143)):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        output, errors = capsys.readouterr()
        assert (end.value.code, errors) == (code, "")
        assert re.search(rf"{name}: saved .*latest\.pt after {done} steps", output)
        assert torch.load(run.latest, weights_only=True)["step"] == done == len(run.metrics())
        assert run.plot_path.exists()
        printed = [shlex.split(line) for line in output.splitlines() if line.strip().startswith("niels-gpt train ")]
        assert printed == [["niels-gpt", "train", "my run", "--resume"]]
        arguments = printed[0][1:]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    assert "resuming my run at step 8" in capsys.readouterr().out
    monkeypatch.setattr(ByteTask, "batch", batch)
    train(run.read_config(), "full")
    check_same(run, RunFolder("full"))
