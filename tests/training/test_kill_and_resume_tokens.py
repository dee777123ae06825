"""Real processes, real kills, on token caches: what is killed in mid-run goes on as if nothing had been."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from niels_gpt.cli.main import main
from niels_gpt.config.yaml_file import dump_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from tests import token_caches
from tests.training import metric_lines, same, weights_sha256

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 90, 8
SIZES = [
    "model.T=48",
    "model.C=48",
    "model.L=2",
    "model.dropout=0.2",
    "train.B=8",
    f"train.total_steps={STEPS}",
    f"output.checkpoint_every={EVERY}",
    "output.eval_every=13",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with caches, the configs of a pretraining and of a fine-tuning, and what the latter begins with."""
    folder = tmp_path_factory.mktemp("kill")
    token_caches.copy_to(folder / "caches")
    for kind in ("pretrain", "sft"):
        start = ["init_from=start.pt"] if kind == "sft" else []
        config = token_caches.small_config(kind, *SIZES, *start, root=Path("caches"))
        (folder / f"{kind}.yaml").write_text(dump_config(config), encoding="utf-8")
    torch.manual_seed(11)
    model = GPT(config.model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    save_checkpoint(folder / "start.pt", model, None, 0, config.model)
    return folder


@pytest.fixture(scope="module", params=["pretrain", "sft"])
def kind(request):
    return request.param


def finish(place, *arguments):
    """Run a command to its end, here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
    assert end.value.code in (0, None)


@pytest.fixture(scope="module")
def whole(place, kind):
    """The uninterrupted run."""
    finish(place, "train", "--config", f"{kind}.yaml", "--run-dir", f"whole-{kind}")
    run = RunFolder(place / f"whole-{kind}")
    assert len(metric_lines(run.path)) == STEPS
    return run


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(place, run, lines, *arguments):
    """Start a run as a process of its own, and kill it once it has written so many lines."""
    command = [sys.executable, "-m", "niels_gpt", "train", "--run-dir", run.path.name, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        deadline = time.monotonic() + 120
        while lines_of(run.metrics_path) < lines:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"the run ended before line {lines}: {process.communicate()}")
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert lines <= lines_of(run.metrics_path) < STEPS, "it was to be killed in mid-run"
    return output


def check_same(run, whole):
    assert metric_lines(run.path) == metric_lines(whole.path)  # every loss of every step, bit for bit
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)
    assert weights_sha256(run.best) == weights_sha256(whole.best)
    assert same(torch.load(run.latest, weights_only=True), torch.load(whole.latest, weights_only=True))
    assert run.tokenizer_path.read_bytes() == whole.tokenizer_path.read_bytes()
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".tmp")]


def test_sigkill_in_mid_run(place, kind, whole, capsys):
    """Killed after a checkpoint, and again in the middle of the resumed run."""
    run = RunFolder(place / f"killed-{kind}")
    kill(place, run, 19, "--config", f"{kind}.yaml")
    output = kill(place, run, 42, "--resume")
    begun = int(re.search(rf"resuming killed-{kind} at step (\d+)", output)[1])
    assert begun % EVERY == 0
    assert begun >= 16
    capsys.readouterr()
    finish(place, "train", "--run-dir", run.path.name, "--resume")
    begun = int(re.search(rf"resuming killed-{kind} at step (\d+)", capsys.readouterr().out)[1])
    assert begun % EVERY == 0
    assert 40 <= begun < STEPS
    check_same(run, whole)


@pytest.mark.parametrize("kind", ["sft"], indirect=True)
def test_sigkill_before_the_first_checkpoint(place, kind, whole):
    """The fine-tuning begins with the weights of its checkpoint again."""
    run = RunFolder(place / f"early-{kind}")
    kill(place, run, 3, "--config", f"{kind}.yaml", "--checkpoint-every", str(STEPS))
    assert not run.latest.exists()
    finish(place, "train", "--run-dir", run.path.name, "--resume")
    check_same(run, whole)
