"""Commands in several processes: what they print, how they end, and torchrun's own kills and restarts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from niels_gpt.config.yaml_file import dump_config
from niels_gpt.runs.folder import RunFolder
from tests import token_caches
from tests.training import metric_lines, small_config, weights_sha256, worlds, write_texts
from tests.training.worlds import run_world

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 120, 10
OPTIONS = ["train", "--config", "c.yaml", "--device", "cpu"]
LONG = [*OPTIONS, "--steps", str(STEPS), "--checkpoint-every", str(EVERY)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and c.yaml; all processes run there."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_texts(folder / "data")
    config = small_config(Path("data"), "train.B=8", "model.dropout=0.2", "model.L=2", "output.eval_every=50")
    (folder / "c.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """The run that nothing happened to, in two processes; and what they printed."""
    found = run_world(2, worlds.command, place, [*LONG, "--run-dir", "whole"], {})
    assert [code for code, *_ in found] == [0, 0], found
    return RunFolder(place / "whole"), found


def check_same(run, whole):
    assert metric_lines(run.path) == metric_lines(whole.path)
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)


# --- commands ----------------------------------------------------------------------------------------


def test_only_the_main_process_prints(whole):
    run, ((_, output, errors), other) = whole
    assert errors == ""
    assert other == (0, "", "")
    assert f"step {STEPS}/{STEPS}" in output
    assert "next: niels-gpt eval --run whole" in output
    assert run.plot_path.exists()
    assert all(line["tokens_per_s"] > 0 for line in run.metrics())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--run-dir", "bad", "--set", "train.B=7"],
            "train.B=7 rows do not share out over 2 processes",
        ),
        (["--run-dir", "bad", "--set", "train.bias=7"], "unknown key train.bias"),
        (["--run-dir", "bad", "--resume"], "bad is not a run"),
        (["--run-dir", "whole"], "whole holds a run already"),
        ([], "several processes need --run-dir"),
        (["--run-dir", "bad", "--set", "train.precision=tf32"], "train.precision=tf32"),
    ],
)
def test_a_mistake_is_said_once_and_ends_all(place, whole, arguments, said):
    (code, output, errors), other = run_world(2, worlds.command, place, [*OPTIONS, *arguments], {})
    assert code == 1
    assert output.count("step ") == 0
    assert errors.count("\n") == errors.count("error: ") == 1
    assert said in errors
    assert other == (1, "", "")
    assert not (place / "bad/config.yaml").exists()


def test_the_config_is_printed_once(place):
    (code, output, errors), other = run_world(2, worlds.command, place, [*OPTIONS, "--print-config"], {})
    assert (code, errors, other) == (0, "", (0, "", ""))
    assert output.startswith("task: bytes")


def test_what_torchrun_starts_again_goes_on_without_being_told(place, tmp_path):
    arguments = [*OPTIONS, "--run-dir", str(tmp_path / "run"), "--steps"]
    for steps, again, said in ((4, "1", "step 4/4"), (12, "2", "resuming .* at step 4")):
        variables = {"TORCHELASTIC_RESTART_COUNT": again}
        options = [*arguments, str(steps), "--allow-config-change"]
        (code, output, errors), _ = run_world(2, worlds.command, place, options, variables)
        assert code == 0, errors
        assert re.search(said, output)
    (code, _, errors), _ = run_world(2, worlds.command, place, [*arguments, "20"], {})
    assert (code, "holds a run already" in errors) == (1, True)


def test_commands_that_each_process_would_do_by_itself_are_refused(place):
    found = run_world(2, worlds.command, place, ["demo", "--steps", "2", "--device", "cpu"], {})
    for code, _, errors in found:
        assert (code, "start this one alone" in errors) == (1, True)


def test_the_pipeline_runs_in_several_processes(tmp_path):
    small = "{T: 16, C: 16, L: 1, H: 2, d_ff: 32, dropout: 0.0}"
    phase = "train: {total_steps: 4, warmup_steps: 1, B: 4}, output: {eval_every: 2, eval_steps: 1, sample_tokens: 2}"
    text = f"data: {{token_cache: {token_caches.folder()}}}\npretrain: {{model: {small}, {phase}}}\nsft: {{{phase}}}\n"
    (tmp_path / "p.yaml").write_text(text, encoding="utf-8")
    command = ["pipeline", "--config", "p.yaml", "--run-dir", "run", "--device", "cpu"]
    (code, output, errors), other = run_world(2, worlds.command, tmp_path, command, {})
    assert (code, errors, other) == (0, "", (0, "", ""))
    assert re.search(r"val_sft: \d", output)
    (code, again, _), other = run_world(2, worlds.command, tmp_path, [*command[:1], *command[3:], "--resume"], {})
    assert (code, other) == (0, (0, "", ""))
    assert again.count("is finished") == 2
    alone = run_world(1, worlds.command, tmp_path, [*command[:3], "--run-dir", "one", "--device", "cpu"], {})
    assert alone[0][0] == 0
    for name in ("pretrain", "sft"):
        losses = [[line["loss"] for line in metric_lines(tmp_path / run / name)] for run in ("run", "one")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- torchrun ----------------------------------------------------------------------------------------


def start(place, *arguments, restarts=0):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", str(restarts), "--standalone", "-m", "niels_gpt", *arguments]
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


def wait_for(process, run, lines):
    """Until the run has written so many lines."""
    deadline = time.monotonic() + 120
    while not run.metrics_path.exists() or run.metrics_path.read_bytes().count(b"\n") < lines:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run ended before line {lines}: {process.communicate()[0]}")
        time.sleep(0.005)


def process_of(parent, rank):
    """The process that torchrun has started for a rank."""
    for child in Path(f"/proc/{parent.pid}/task").glob("*/children"):
        for pid in child.read_text(encoding="utf-8").split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    pytest.fail(f"torchrun has no process of rank {rank}")


linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@linux
@pytest.mark.slow
def test_a_killed_process_ends_all_and_max_restarts_goes_on(place, whole):
    run = RunFolder(place / "killed")
    process = start(place, *LONG, "--run-dir", "killed", restarts=1)
    wait_for(process, run, 33)
    os.kill(process_of(process, 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)  # nobody waits for a timeout of many minutes
    assert process.returncode == 0, output
    assert "another of the 2 processes has ended" in output
    step = int(re.search(r"resuming killed at step (\d+)", output)[1])
    assert (step % EVERY, step < STEPS, step >= 30) == (0, True, True)
    check_same(run, whole[0])


@linux
@pytest.mark.slow
def test_sigterm_saves_on_all_and_the_same_command_goes_on(place, whole):
    run = RunFolder(place / "stopped")
    command = [*LONG, "--run-dir", "stopped", "--resume-if-there"]
    process = start(place, *command)
    wait_for(process, run, 13)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    done = int(re.search(r"SIGTERM: saved stopped/checkpoints/latest.pt after (\d+) updates. Go on with", output)[1])
    assert "torchrun (its options as before) -m niels_gpt train --run-dir stopped --resume" in output
    assert 13 <= done == len(run.metrics()) < STEPS
    (code, output, errors), _ = run_world(2, worlds.command, place, command, {})
    assert code == 0, errors
    assert f"resuming stopped at step {done}" in output
    check_same(run, whole[0])
