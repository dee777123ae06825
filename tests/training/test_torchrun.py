"""Commands in several processes: their output and exit codes, and torchrun's kills and restarts."""

import re
from pathlib import Path

import pytest

from niels_gpt.config.yaml_file import dump_config
from niels_gpt.runs.folder import RunFolder
from tests import token_caches
from tests.training import metric_lines, small_config, weights_sha256, worlds, write_texts
from tests.training.worlds import run_world

STEPS = 20
TRAIN = ["train", "--config", "c.yaml", "--device", "cpu"]
MISTAKES = {
    r"train\.B=7\b": ["--run-dir", "bad", "--set", "train.B=7"],
    r"train\.bias": ["--run-dir", "bad", "--set", "train.bias=7"],
    r"bad is not a run": ["--run-dir", "bad", "--resume"],
    r"full .*--resume": ["--run-dir", "full"],
    r"--run-dir": [],
    r"tf32|CUDA": ["--run-dir", "bad", "--set", "train.precision=tf32"],
}
PIPELINE = ["pipeline", "--device", "cpu", "--run-dir"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts, c.yaml and p.yaml, where all commands run."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_texts(folder / "data")
    options = ["train.B=8", "model.dropout=0.2", f"train.total_steps={STEPS}", "output.eval_every=10"]
    (folder / "c.yaml").write_text(dump_config(small_config(Path("data"), *options)), encoding="utf-8")
    small = "{T: 16, C: 16, L: 1, H: 2, d_ff: 32, dropout: 0.0}"
    phase = "train: {total_steps: 3, warmup_steps: 1, B: 4}, output: {eval_every: 2, eval_steps: 1, sample_tokens: 2}"
    text = f"data: {{token_cache: {token_caches.folder()}}}\npretrain: {{model: {small}, {phase}}}\nsft: {{{phase}}}\n"
    (folder / "p.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """(exit code, stdout, stderr) of both processes, by command."""
    commands = {
        "train": [*TRAIN, "--run-dir", "full"],
        **{facts: [*TRAIN, *arguments] for facts, arguments in MISTAKES.items()},
        "print": [*TRAIN, "--print-config"],
        "demo": ["demo", "--steps", "2", "--device", "cpu"],
        "demo --bytes": ["demo", "--bytes", "--steps", "2", "--device", "cpu"],
        "notes": ["notes", "data", "--device", "cpu"],
        "pipeline": [*PIPELINE, "two", "--config", "p.yaml"],
        "pipeline again": [*PIPELINE, "two", "--resume"],
    }
    first, second = run_world(2, worlds.commands, folder, list(commands.values()))
    return dict(zip(commands, zip(first, second, strict=True), strict=True))


def test_only_the_main_process_prints(folder, results):
    (code, output, errors), other = results["train"]
    assert (code, errors, other) == (0, "", (0, "", ""))
    assert f"step {STEPS}/{STEPS}" in output
    assert re.search(r"next:\n  .* eval full\n  .* chat full\n", output)
    run = RunFolder(folder / "full")
    assert run.plot_path.exists()
    assert all(line["tokens_per_s"] > 0 for line in run.metrics())
    (code, output, errors), other = results["print"]
    assert (code, errors, other) == (0, "", (0, "", ""))
    assert output.startswith("task: bytes")


@pytest.mark.parametrize("facts", MISTAKES)
def test_a_mistake_is_reported_once_and_ends_all_processes(folder, results, facts):
    (code, output, errors), other = results[facts]
    assert (code, other) == (1, (1, "", ""))
    assert "step " not in output
    assert errors.count("\n") == errors.count("error: ") == 1
    assert re.search(facts, errors)
    assert not (folder / "bad/config.yaml").exists()


def test_commands_that_do_not_distribute_their_work_are_rejected(results):
    for name in ("demo", "demo --bytes", "notes"):
        for code, _, errors in results[name]:
            assert (code, "torchrun" in errors) == (1, True), name


def test_the_pipeline_runs_in_several_processes(results):
    (code, output, errors), other = results["pipeline"]
    assert (code, errors, other) == (0, "", (0, "", ""))
    assert re.search(r"val_sft: \d", output)
    (code, again, _), other = results["pipeline again"]
    assert (code, other, again.count("finished")) == (0, (0, "", ""), 2)


def test_torchrun_restarts_after_a_kill_and_forwards_sigterm(folder, results):
    """Rank 1 is killed at step 6; torchrun restarts both, and gets SIGTERM at step 10; then the run is resumed."""
    [(raised, output)] = run_world(1, worlds.torchrun, folder, [*TRAIN, "--run-dir", "killed"])
    assert raised == "SignalException", output
    assert "another of the 2 processes" in output
    assert "resuming killed at step 4" in output
    done = int(re.search(r"SIGTERM: saved killed/checkpoints/latest\.pt after (\d+) steps", output)[1])
    assert "torchrun" in output and "niels_gpt train killed --resume" in output
    run = RunFolder(folder / "killed")
    assert 10 < done == len(run.metrics()) < STEPS
    resume = [*TRAIN, "--run-dir", "killed", "--resume-if-there"]
    [(code, output, errors)], _ = run_world(2, worlds.commands, folder, [resume])
    assert code == 0, errors
    assert f"resuming killed at step {done}" in output
    full = RunFolder(folder / "full")
    assert metric_lines(run.path) == metric_lines(full.path)
    assert weights_sha256(run.latest) == weights_sha256(full.latest)
