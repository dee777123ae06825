"""`niels-gpt train`: the run it leaves, signals, resume, full disks, and data that cannot be trained on."""

import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys

import pytest
import torch

from niels_gpt.cli.train import check_run_dir, exit_if_stopped, program
from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.report import curves
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.processes import World
from niels_gpt.training.loop import TrainResult
from tests.cli import SMALL, After, call, data, error_of, report_to, send
from tests.training import metric_lines, write_texts

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_texts(tmp_path / "data")


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)


def test_a_run_leaves_config_metrics_checkpoints_samples_and_plot(texts, tmp_path, capsys):
    options = [*SMALL, *data(texts), "--steps", 6, "--checkpoint-every", 2, "--set", "output.eval_every=3"]
    assert call("train", *options, "--print-config") == 0
    resolved = capsys.readouterr().out
    assert call("train", *options, "--run-dir", "out") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "\x1b" not in output  # piped: plain lines
    assert re.search(r"^roam +60\.0% ", output, re.MULTILINE)
    assert re.search(r"^step 3/6 .*val_roam \d\.\d+  val_chat \d\.\d+.*tok/s", output, re.MULTILINE)
    assert re.search(r"^step 6/6 ", output, re.MULTILINE)
    assert "niels-gpt chat out" in output and "niels-gpt research memorize" not in output
    run = tmp_path / "out"
    (tmp_path / "printed.yaml").write_text(resolved, encoding="utf-8")
    assert load_config(run / "config.yaml") == with_absolute_paths(load_config(tmp_path / "printed.yaml"))
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (run / "samples").iterdir()] == ["step_00000006.txt"]
    names = {"best.pt", "latest.pt", "config.json", *(f"step_0000000{i}.pt" for i in (2, 4, 6))}
    assert {path.name for path in (run / "checkpoints").iterdir()} == names
    best = torch.load(run / "checkpoints/latest.pt", weights_only=True)["extra"]["best"]
    assert f"best validation loss {best['loss']:.4f} after {best['step']} steps" in output
    lines = [
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(6))
    assert all({"step", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(line) for line in lines)
    (run / "loss.png").unlink()
    assert call("train", *options, "--run-dir", "out") == 1
    assert not (run / "loss.png").exists()  # a run that is refused changes nothing in the folder


def test_a_short_try_has_a_shorter_warm_up(texts, tmp_path, capsys, no_plot):
    """The default of 200 steps is longer than the run; one that was asked for is not changed."""
    options = [option for option in SMALL if "warmup" not in option]
    assert call("train", *options, *data(texts), "--steps", 20, "--run-dir", "out") == 0
    assert re.search(r"2 of 20 steps instead of 200.*train\.warmup_steps", "".join(capsys.readouterr()))
    assert load_config(tmp_path / "out/config.yaml").train.warmup_steps == 2
    assert len(metric_lines(tmp_path / "out")) == 20
    assert call("train", *options, *data(texts), "--steps", 20, "--set", "train.warmup_steps=20") == 1
    assert "20" in error_of(capsys)


def test_run_folders_are_named_after_the_config(texts, tmp_path, capsys, no_plot):
    shutil.move(texts / "notes", tmp_path / ".roam-data")  # the default paths
    (tmp_path / "my-model.yaml").write_text("train: {warmup_steps: 0}\n", encoding="utf-8")
    assert call("train", *SMALL, "--config", "my-model.yaml", "--steps", 1) == 0
    assert call("train", *SMALL, "--steps", 1) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["my-model", "train"]
    output = capsys.readouterr().out
    for path in (".roam-data (built)", ".roam-data (cached)", "data/primer.txt (built)"):
        assert path in output


# --- signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "folder"),
    [
        (signal.SIGINT, "out"),
        (signal.SIGTERM, "it's"),
        (signal.SIGHUP, "a [draft] run"),
    ],
)
def test_the_command_to_resume_can_be_typed_as_it_is_printed(texts, capsys, monkeypatch, no_plot, number, folder):
    report_to(monkeypatch, After(3, send(number)))
    assert call("train", *SMALL, *data(texts), "--steps", 6, "--run-dir", folder) == 128 + number
    output = capsys.readouterr().out
    assert f"{number.name}: saved {folder}/checkpoints/latest.pt after 4 steps" in output
    commands = [shlex.split(line) for line in output.splitlines() if line.strip().startswith("niels-gpt train ")]
    assert commands == [["niels-gpt", "train", folder, "--resume"]]
    assert call(*commands[0][1:]) == 0
    assert [line["step"] for line in metric_lines(texts.parent / folder)] == list(range(6))


def test_signals_while_the_plot_is_drawn_do_not_cut_the_message(texts, capsys, monkeypatch):
    report_to(monkeypatch, After(1, send(signal.SIGTERM)))
    monkeypatch.setattr(curves, "plot_losses", lambda run: [send(number)() for number in STOPS])
    before = [signal.getsignal(number) for number in STOPS]
    assert call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", "out") == 143
    output, errors = capsys.readouterr()
    assert "niels-gpt train out --resume" in output
    assert errors == ""
    assert [signal.getsignal(number) for number in STOPS] == before


def test_without_a_signal_nothing_exits_and_under_torchrun_the_command_says_so(capsys, tmp_path):
    result, run = TrainResult(step=7, run_dir=tmp_path), RunFolder(tmp_path)
    exit_if_stopped(None, result, run)
    for rank, printed in ((0, 1), (1, 0)):
        with pytest.raises(SystemExit) as end:
            exit_if_stopped("SIGTERM", result, run, world=World(rank=rank, size=2))
        assert end.value.code == 143
        assert capsys.readouterr().out.count("torchrun (same options) -m niels_gpt train") == printed
    with pytest.raises(SystemExit):
        exit_if_stopped("SIGINT", result, run, command="the same command")
    assert capsys.readouterr().out.splitlines()[-1].strip() == "the same command"
    assert program(World()) == "niels-gpt"


def test_a_closed_pipe_does_not_end_the_run(texts, tmp_path, monkeypatch, no_plot):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert call("train", *SMALL, *data(texts), "--steps", 3, "--run-dir", "out") == 0
    assert len(metric_lines(tmp_path / "out")) == 3


# --- several processes -------------------------------------------------------------------------------


def test_an_error_of_another_process_names_its_rank(texts, capsys, monkeypatch):
    for rank, begins in ((1, "rank 1: --device"), (0, "--device")):
        for name, value in (("WORLD_SIZE", 2), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        assert call("train", "--run-dir", "out", "--device", "abacus") == 1
        assert error_of(capsys).startswith(begins)


def test_when_run_dir_is_needed(tmp_path):
    one, two = World(), World(size=2)
    check_run_dir(None, needed=False, world=one, print_config=False)
    check_run_dir(None, needed=False, world=two, print_config=True)
    check_run_dir(tmp_path, needed=True, world=two, print_config=False)
    with pytest.raises(ValueError, match=r"2 processes.*--run-dir"):
        check_run_dir(None, needed=False, world=two, print_config=False)
    with pytest.raises(ValueError, match=r"--resume.*--run-dir"):
        check_run_dir(None, needed=True, world=one, print_config=True)


# --- resume ------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(texts, tmp_path, monkeypatch, capsys, no_plot):
    """A run of six steps that was stopped after the second."""
    report_to(monkeypatch, After(1, send(signal.SIGTERM)))
    assert call("train", *SMALL, *data(texts), "--steps", 6, "--run-dir", "out") == 143
    capsys.readouterr()
    return tmp_path / "out"


def test_resume_with_a_changed_config_and_changed_data(stopped, texts, capsys):
    resume = ["train", "--run-dir", "out", "--resume"]
    config = (stopped / "config.yaml").read_bytes()
    assert call(*resume, "--set", "train.base_lr=0.5") == 1
    message = error_of(capsys)
    assert re.search(r"train\.base_lr.* 0\.01.* 0\.5", message) and "--allow-config-change" in message
    assert (stopped / "config.yaml").read_bytes() == config
    assert call(*resume, "--set", "model.T=16", "--allow-config-change") == 1
    assert re.search(r"model\.T.* 32.* 16.*new run", error_of(capsys))
    for note in (texts / "notes").iterdir():
        note.write_text(note.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    changed = [*resume, "--set", "train.base_lr=0.5", "--allow-config-change"]
    assert call(*changed) == 1
    message = error_of(capsys)
    assert "roam" in message and "primer" not in message and "--allow-data-change" in message
    assert call(*changed, "--allow-data-change") == 0
    assert metric_lines(stopped)[3]["lr"] > 0.1


def test_resume_if_there(stopped, texts, capsys):
    new = ["train", *SMALL, *data(texts), "--steps", 2]
    assert call("train", "--run-dir", "out", "--resume-if-there") == 0
    assert [line["step"] for line in metric_lines(stopped)] == list(range(6))
    assert call(*new, "--run-dir", "new", "--resume-if-there") == 0
    assert call("train", "--run-dir", "new", "--resume") == 0  # finished: nothing is left to do
    capsys.readouterr()
    assert call(*new, "--resume-if-there") == 1
    assert "--run-dir" in error_of(capsys)


# --- training that fails -----------------------------------------------------------------------------


def test_divergence_names_the_step_and_the_plot_is_drawn(texts, tmp_path, capsys):
    options = ["--set", "train.base_lr=1e30", "--steps", 5, "--run-dir", "out"]
    assert call("train", *SMALL, *data(texts), *options) == 1
    assert re.search("step 1 .*checkpoint", error_of(capsys))
    assert (tmp_path / "out/loss.png").exists()


def test_a_full_disk_names_the_checkpoint_that_was_not_saved(texts, tmp_path, capsys, monkeypatch):
    """And not the plot, which cannot be written either."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    report_to(monkeypatch, After(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))))
    try:
        code = call("train", *SMALL, *data(texts), "--steps", 9, "--checkpoint-every", 2, "--run-dir", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert "step_00000004.pt" in error_of(capsys)
    assert torch.load(tmp_path / "out/checkpoints/latest.pt", weights_only=True)["step"] == 2


# --- what is refused before any work -----------------------------------------------------------------


def test_files_that_are_not_utf8(texts, capsys, no_plot):
    bad = texts / "notes/note_00.md"
    bad.write_bytes(b"# caf\xe9\n" + b"word " * 50)
    train = ["train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out"]
    assert call(*train) == 1
    message = error_of(capsys)
    assert str(bad) in message and "offset 5" in message and "--encoding-errors replace" in message
    assert not (texts.parent / "out/config.yaml").exists()
    assert call(*train, "--encoding-errors", "replace") == 0


def test_a_run_folder_deleted_under_the_run_ends_it(texts, tmp_path, capsys, monkeypatch):
    report_to(monkeypatch, After(3, lambda: shutil.rmtree(tmp_path / "out")))
    assert call("train", *SMALL, *data(texts), "--steps", 100, "--run-dir", tmp_path / "out") == 1
    assert "out was deleted or moved while the run was training" in error_of(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("model.V=100", r"model\.V=100.*largest byte is \d+"),
        ("train.B=1" + "0" * 20, r"train\.B .*46116860\d+"),
    ],
)
def test_impossible_values_are_refused_before_the_folder_is_created(texts, tmp_path, capsys, option, facts):
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out", "--set", option) == 1
    assert re.search(facts, error_of(capsys))
    assert not (tmp_path / "out").exists()


def test_a_plot_that_cannot_be_written_is_a_warning(texts, tmp_path, capsys, monkeypatch):
    def refuse(run):
        raise OSError(errno.ENOSPC, f"cannot write {run.plot_path}: No space left on device")

    monkeypatch.setattr(curves, "plot_losses", refuse)
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out", "--quiet") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: out/loss.png was not written") and "No space left" in line
