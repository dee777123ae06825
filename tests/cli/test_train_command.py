import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from niels_gpt.cli import train
from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.progress import Silent
from tests.cli import SMALL, call, data, error_of
from tests.training import metric_lines, write_texts


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_texts(tmp_path / "data")


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class At(Silent):
    """Does something after an update."""

    def __init__(self, step, action):
        self.at, self.action = step, action

    def step(self, line):
        if line["step"] + 1 == self.at:
            self.action()


def test_a_run_from_the_command_line(texts, tmp_path, capsys):
    options = [*SMALL, *data(texts), "--steps", 6, "--checkpoint-every", 2, "--set", "output.eval_every=3"]
    assert call("train", *options, "--print-config") == 0
    resolved = capsys.readouterr().out
    assert call("train", *options, "--run-dir", "out") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "\x1b" not in output  # piped: plain lines
    assert re.search(r"^roam +60\.0%", output, re.MULTILINE)
    assert re.search(r"^step 3/6 .*val_roam \d\.\d+  val_chat \d\.\d+.*tok/s", output, re.MULTILINE)
    assert re.search(r"^step 6/6 ", output, re.MULTILINE)
    assert "niels-gpt chat --run out" in output
    run = tmp_path / "out"
    assert (run / "config.yaml").read_text(encoding="utf-8") == resolved
    assert [line["step"] for line in metric_lines(run)] == list(range(6))
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (run / "samples").iterdir()] == ["step_00000006.txt"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "best.pt",
        "latest.pt",
        "config.json",
        "step_00000002.pt",
        "step_00000004.pt",
        "step_00000006.pt",
    }
    best = torch.load(run / "checkpoints/latest.pt", weights_only=True)["extra"]["best"]
    assert f"best validation loss {best['loss']:.4f} after {best['step']} steps" in output


def test_run_folders_are_named_after_the_config(texts, tmp_path, capsys):
    shutil.move(texts / "notes", tmp_path / ".roam-data")  # the usual places
    (tmp_path / "my-model.yaml").write_text("train: {warmup_steps: 0}\n", encoding="utf-8")
    for _ in range(2):
        assert call("train", *SMALL, "--config", "my-model.yaml", "--steps", 1) == 0
    assert call("train", *SMALL, "--steps", 1) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["my-model", "my-model-2", "train"]
    output = capsys.readouterr().out
    assert ".roam-data (built)" in output
    assert ".roam-data (cached)" in output
    assert "data/primer.txt (built)" in output


def test_a_folder_that_holds_a_run(texts, tmp_path, capsys):
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out") == 0
    before = snapshot(tmp_path / "out")
    capsys.readouterr()
    assert call("train", *SMALL, *data(texts), "--steps", 4, "--run-dir", "out") == 1
    message = error_of(capsys)
    assert "out" in message
    assert "--resume" in message
    assert snapshot(tmp_path / "out") == before


def test_a_second_process_at_the_same_time(texts, tmp_path, capsys):
    with RunFolder("out").lock():
        assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out") == 1
    assert "another process is training into out" in error_of(capsys)
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("folder", ["out", "a run", "a [draft] run", "it's", "[bold]"])
def test_the_command_to_go_on_with_can_be_typed_as_it_is_shown(texts, capsys, monkeypatch, number, code, folder):
    monkeypatch.setattr(train, "reporter", lambda: At(3, lambda: os.kill(os.getpid(), number)))
    assert call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", folder) == code
    output = capsys.readouterr().out
    assert number.name in output
    assert f"{folder}/checkpoints/latest.pt" in output
    said = [shlex.split(line) for line in output.splitlines() if line.strip().startswith("niels-gpt train ")]
    assert said == [["niels-gpt", "train", "--run-dir", folder, "--resume"]]
    monkeypatch.undo()
    monkeypatch.chdir(texts.parent)
    assert call(*said[0][1:]) == 0
    assert [line["step"] for line in metric_lines(texts.parent / folder)] == list(range(9))


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_while_the_picture_is_drawn_does_not_cut_the_message(texts, capsys, monkeypatch, second):
    monkeypatch.setattr(train, "reporter", lambda: At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    monkeypatch.setattr(train, "plot_losses", lambda run: os.kill(os.getpid(), second))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", "out") == 143
    output, errors = capsys.readouterr()
    assert "niels-gpt train --run-dir out --resume" in output
    assert errors == ""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_pipe_that_is_closed_does_not_end_the_run(texts, tmp_path):
    command = shlex.join(["-m", "niels_gpt", "train", *SMALL, *data(texts), "--steps", "6", "--run-dir", "out"])
    script = f"{shlex.quote(sys.executable)} {command} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert len(metric_lines(tmp_path / "out")) == 6
    assert torch.load(tmp_path / "out/checkpoints/latest.pt", weights_only=True)["step"] == 6


def test_an_error_of_another_process_says_whose_it_is(texts, capsys, monkeypatch):
    for rank, begins in ((1, "rank 1: --device"), (0, "--device")):
        for name, value in (("WORLD_SIZE", 2), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        assert call("train", "--run-dir", "out", "--device", "abacus") == 1
        assert error_of(capsys).startswith(begins)


def test_resume_with_a_changed_config(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "reporter", lambda: At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", "out") == 143
    monkeypatch.setattr(train, "reporter", Silent)
    capsys.readouterr()
    config = (tmp_path / "out/config.yaml").read_bytes()
    assert call("train", "--run-dir", "out", "--resume", "--set", "train.base_lr=0.5") == 1
    message = error_of(capsys)
    assert "train.base_lr was 0.01, is 0.5" in message
    assert "--allow-config-change" in message
    assert (tmp_path / "out/config.yaml").read_bytes() == config
    assert call("train", "--run-dir", "out", "--resume", "--set", "model.T=16", "--allow-config-change") == 1
    assert "model.T was 32, is 16" in error_of(capsys)
    changed = ["--set", "train.base_lr=0.5", "--allow-config-change"]
    assert call("train", "--run-dir", "out", "--resume", *changed) == 0
    assert metric_lines(tmp_path / "out")[4]["lr"] > 0.1


def test_resume_on_other_data(texts, capsys, monkeypatch):
    monkeypatch.setattr(train, "reporter", lambda: At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", "out") == 143
    monkeypatch.setattr(train, "reporter", Silent)
    capsys.readouterr()
    for note in (texts / "notes").iterdir():
        note.write_text(note.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    assert call("train", "--run-dir", "out", "--resume") == 1
    message = error_of(capsys)
    assert "roam" in message
    assert "primer" not in message
    assert "--allow-data-change" in message
    assert call("train", "--run-dir", "out", "--resume", "--allow-data-change") == 0


def test_divergence_is_told_with_step_and_checkpoint(texts, tmp_path, capsys):
    options = ["--set", "train.base_lr=1e30", "--steps", 5, "--run-dir", "out"]
    assert call("train", *SMALL, *data(texts), *options) == 1
    message = error_of(capsys)
    assert "step 1 " in message
    assert "checkpoint" in message
    assert (tmp_path / "out/loss.png").exists()


def test_a_full_disk_names_the_checkpoint_that_could_not_be_saved(texts, tmp_path, capsys, monkeypatch):
    """And not the picture, which cannot be written either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(
        train, "reporter", lambda: At(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard)))
    )
    try:
        options = ["--steps", 9, "--checkpoint-every", 2, "--run-dir", "out"]
        code = call("train", *SMALL, *data(texts), *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    message = error_of(capsys)
    assert torch.load(tmp_path / "out/checkpoints/latest.pt", weights_only=True)["step"] == 2
    assert "step_00000004.pt" in message


def test_a_full_disk_at_a_line_of_metrics_is_told_with_its_path(texts, tmp_path, capsys, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        size = (tmp_path / "out/metrics.jsonl").stat().st_size + 5  # room for a part of the next line
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    monkeypatch.setattr(train, "reporter", lambda: At(3, fill))
    try:
        code = call("train", *SMALL, *data(texts), "--steps", 9, "--run-dir", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    message = error_of(capsys)
    assert "cannot write out/metrics.jsonl: File too large" in message
    assert "free some space" in message
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert call("train", "--run-dir", "out", "--resume") == 0
    assert [line["step"] for line in metric_lines(tmp_path / "out")] == list(range(9))


def test_a_run_dir_that_is_a_file(texts, capsys):
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", str(texts / "primer.txt")) == 1
    message = error_of(capsys)
    assert "primer.txt is a file" in message
    assert "choose another --run-dir" in message


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("model.V=100", "model.V=100, but the largest byte is"),
        ("model.V=100000000000000", "weights"),
        ("model.d_ff=1000000000000", "weights"),
        ("train.B=9223372036854775807", "rows"),
        ("train.B=100000000000000000000", "rows"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_the_folder_is_made(texts, tmp_path, capsys, option, named):
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out", "--set", option) == 1
    assert named in error_of(capsys)
    assert not (tmp_path / "out").exists()


# --- bad text ----------------------------------------------------------------------------------------


def refused(capsys, texts, *options):
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out", *options) == 1
    assert not (texts.parent / "out/config.yaml").exists()
    return error_of(capsys)


def test_a_file_that_is_not_utf8(texts, capsys):
    bad = texts / "notes/note_00.md"
    bad.write_bytes(b"# caf\xe9\n" + b"word " * 50)
    message = refused(capsys, texts)
    assert str(bad) in message
    assert "offset 5" in message
    assert "--encoding-errors replace" in message
    assert call("train", *SMALL, *data(texts), "--steps", 2, "--run-dir", "out", "--encoding-errors", "replace") == 0


def test_a_primer_that_is_not_utf8(texts, capsys):
    (texts / "primer.txt").write_bytes(b"user: hi\nassistant: \xff" + b"word " * 50)
    message = refused(capsys, texts)
    assert "primer.txt" in message
    assert "offset 20" in message


def test_notes_that_are_empty(texts, capsys):
    for note in (texts / "notes").iterdir():
        note.write_text("", encoding="utf-8")
    assert "roam/train" in refused(capsys, texts)


def test_a_folder_without_notes(texts, capsys):
    shutil.rmtree(texts / "notes")
    (texts / "notes").mkdir()
    assert "roam" in refused(capsys, texts)


def test_a_stream_shorter_than_a_window(texts, capsys):
    (texts / "primer.txt").write_text("user: a\nassistant: b\n\n<dialogue>\n\nuser: c\nassistant: d", encoding="utf-8")
    message = refused(capsys, texts)
    assert "primer/train has 20 bytes" in message
    assert "T + 1 = 33" in message


def test_probabilities_that_do_not_sum(texts, capsys):
    message = refused(capsys, texts, "--set", "train.p_train={roam: 0.5, primer: 0.4}")
    assert "train.p_train must sum to 1" in message
    assert "0.9" in message


def test_the_metrics_are_plain_json(texts, tmp_path):
    assert call("train", *SMALL, *data(texts), "--steps", 3, "--run-dir", "out") == 0
    for line in (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line, parse_constant=pytest.fail)
        assert {"step", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(entry)
