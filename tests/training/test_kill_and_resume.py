"""Real processes, real signals: what is killed in mid-run goes on as if nothing had been."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import dump_config
from niels_gpt.runs.folder import RunFolder
from tests.training import metric_lines, same, small_config, weights_sha256, write_texts

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 100, 10
OPTIONS = ["train", "--config", "c.yaml", "--steps", str(STEPS), "--checkpoint-every", str(EVERY)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and c.yaml; all processes run there."""
    folder = tmp_path_factory.mktemp("kill")
    write_texts(folder / "data")
    sizes = ["model.T=64", "model.C=64", "model.L=2", "model.dropout=0.2", "train.B=8", "output.eval_every=15"]
    config = small_config(Path("data"), *sizes)
    (folder / "c.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


def start(place, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "niels_gpt", *arguments]
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process, metrics, lines):
    """Until the run has written so many lines."""
    deadline = time.monotonic() + 120
    while lines_of(metrics) < lines:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run ended before line {lines}: {process.communicate()}")
        time.sleep(0.001)


def stop(process, number):
    """Send the signal; (exit code, stdout, stderr)."""
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def finish(process):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def whole(place):
    """The uninterrupted run."""
    finish(start(place, *OPTIONS, "--run-dir", "whole"))
    run = RunFolder(place / "whole")
    assert len(metric_lines(run.path)) == STEPS
    return run


def check_same(run, whole):
    assert metric_lines(run.path) == metric_lines(whole.path)  # every loss of every step, bit for bit
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)
    assert weights_sha256(run.best) == weights_sha256(whole.best)
    assert same(torch.load(run.latest, weights_only=True), torch.load(whole.latest, weights_only=True))
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".tmp")]


def test_sigkill_in_mid_run(place, whole):
    """Killed before the first checkpoint, after one, and again in the middle of the resumed run."""
    run = RunFolder(place / "killed")
    resume = []
    for lines in (4, 33, 67):
        process = start(place, *OPTIONS, "--run-dir", "killed", *resume)
        wait_for(process, run.metrics_path, lines)
        code, output, _ = stop(process, signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert lines <= lines_of(run.metrics_path) < STEPS, "it was to be killed in mid-run"
        if resume:
            assert re.search(r"resuming killed at step \d+0|killed has no checkpoint yet", output), output
        resume = ["--resume"]
    output = finish(start(place, *OPTIONS, "--run-dir", "killed", "--resume"))
    begun = int(re.search(r"resuming killed at step (\d+)", output)[1])
    assert begun % EVERY == 0
    assert 60 <= begun < STEPS
    check_same(run, whole)


def test_ctrl_c_and_sigterm_save_and_say_how_to_go_on(place, whole, monkeypatch, capsys):
    run = RunFolder(place / "my run")
    arguments = [*OPTIONS, "--run-dir", "my run"]
    stops = [(13, signal.SIGINT, 130), (47, signal.SIGTERM, 143)]
    for lines, number, expected in stops:
        process = start(place, *arguments)
        wait_for(process, run.metrics_path, lines)
        with pytest.raises(ValueError, match="another process"), run.lock():
            pytest.fail("a second process got the folder")
        code, output, errors = stop(process, number)
        assert code == expected, errors
        assert "Traceback" not in errors
        done = int(re.search(rf"{number.name}: saved .* after (\d+) updates", output)[1])
        assert lines <= done < STEPS
        assert torch.load(run.latest, weights_only=True)["step"] == done == len(metric_lines(run.path))
        assert run.plot_path.exists()
        said = [shlex.split(line) for line in output.splitlines() if line.strip().startswith("niels-gpt train ")]
        assert said == [["niels-gpt", "train", "--run-dir", "my run", "--resume"]]
        arguments = said[0][1:]
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    assert f"resuming my run at step {done}" in capsys.readouterr().out
    check_same(run, whole)
