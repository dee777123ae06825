"""The comparison of predictions with measurements: the recorded part, errors, and one tiny run."""

import subprocess
import sys

import pytest

from niels_gpt.runs.folder import RunFolder
from scripts import scale_check
from scripts.scale_check import ROWS, SKIPPED, Bench


def test_the_recorded_figures_of_one_gpu_are_near_the_predictions(capsys):
    assert scale_check.main(["--recorded"]) == 0
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert tuple(head) == scale_check.HEAD and len(rows) == 6
    ratios = {row[0]: float(row[3]) for row in rows if row[3]}
    assert all(0.8 < ratio < 1.25 for ratio in ratios.values()), ratios
    wait = next(row for row in rows if "data wait" in row[0])
    assert float(wait[1]) < 1 and float(wait[2]) < 1  # percent


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--steps", "few"], ["--kills", "-1"], ["--seed", "-1"]])
def test_bad_input_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        scale_check.main(arguments)
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and len(errors.splitlines()) == 1 and arguments[0] in errors


def test_a_failed_run_is_one_line(monkeypatch, capsys):
    def fail(bench, rng):
        raise RuntimeError("the run half ended with exit code 1:\nerror: no disk")

    monkeypatch.setattr(scale_check, "two_processes", fail)
    assert scale_check.main([]) == 1
    output, errors = capsys.readouterr()
    assert output == "" and errors == "error: the run half ended with exit code 1: error: no disk\n"


def test_a_run_that_fails_names_its_last_line(tmp_path):
    bench = Bench(tmp_path, 20)
    process = bench.start("bad", 1, ROWS, "train.B=0")
    with pytest.raises(RuntimeError, match=r"bad ended with exit code \d: .*train\.B"):
        bench.finish("bad", process)


def test_the_runs_that_an_error_left_are_ended(tmp_path):
    bench = Bench(tmp_path, 20)
    bench.started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    bench.stop()
    assert bench.started[0].poll() is not None


@pytest.mark.slow
def test_the_share_of_the_cpu_is_at_most_a_core_for_each_process():
    assert 0 < scale_check.cpu_share(1) <= 1.05 and 0 < scale_check.cpu_share(2) <= 1.05


@pytest.mark.slow
def test_the_steps_of_a_run_are_timed(tmp_path):
    bench = Bench(tmp_path, 4 * SKIPPED)
    seconds = bench.measure("one", 1, 2)
    lines = RunFolder(tmp_path / "one").metrics()
    assert len(lines) == 4 * SKIPPED and len(seconds) == 3 * SKIPPED
    assert seconds[0] == pytest.approx(2 * scale_check.T / lines[SKIPPED]["tokens_per_s"])
