"""loss.png: what is plotted, and the smoothing."""

import json
import math

import matplotlib.image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.curves import plot_comparison, plot_losses, smooth
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import RunInfo
from tests.runs.test_catalog import P_VAL, make_run


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    return folder


def write_metrics(run, lines, tail=""):
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")


def test_no_losses(run, tmp_path):
    plot_losses(RunFolder(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    plot_losses(run)
    write_metrics(run, [])
    plot_losses(run)
    assert not run.plot_path.exists()


def test_dollar_signs_in_names_are_not_formulas(tmp_path):
    """`$5_vs_$` would be an invalid formula, an error at the end of a training."""
    run = RunFolder(tmp_path / "cost_$5_vs_$6")
    run.path.mkdir()
    write_metrics(run, [{"step": 1, "loss": 3.0, "evals": {"val_$_$": 2.0}}])
    plot_losses(run)
    assert run.plot_path.exists()


@pytest.mark.parametrize("steps", [1, 50])
def test_png(run, steps, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    write_metrics(run, [{"step": s, "loss": 5 - s / 50} for s in range(steps)], tail='{"step": 99, "lo')
    plot_losses(run)
    height, width, _ = matplotlib.image.imread(run.plot_path).shape
    assert width > height > 300
    assert sorted(path.name for path in run.path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_lines_of_the_plot(run, monkeypatch):
    from matplotlib.figure import Figure

    drawn = {}

    def collect(self, file, **options):
        axes = self.axes[0]
        drawn.update({line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()})
        drawn["title"] = axes.get_title()
        drawn["limits"] = axes.get_ylim()
        file.write(b"picture")

    monkeypatch.setattr(Figure, "savefig", collect)
    lines = [{"step": s, "loss": 5.0 - s} for s in range(4)]
    lines[1]["evals"] = {"val_wiki": 4.5}
    lines[3]["evals"] = {"val_wiki": 2.5, "val_roam": 2.0}
    write_metrics(run, lines)
    plot_losses(run)
    assert drawn.pop("title") == "my run"
    assert drawn.pop("limits")[1] >= 5.0
    assert drawn.pop("train, each step") == [[s, 5.0 - s] for s in range(4)]
    assert [x for x, _ in drawn.pop("train, smoothed")] == [0, 1, 2, 3]
    assert drawn == {"val_wiki": [[1, 4.5], [3, 2.5]], "val_roam": [[3, 2.0]]}
    assert run.plot_path.read_bytes() == b"picture"


@pytest.mark.parametrize(("steps", "evals"), [(99, {}), (100, {}), (100, {"val_wiki": 1.8, "val_wiki/detail": 9.0})])
def test_the_first_losses_of_a_long_run_are_cut_off(run, monkeypatch, steps, evals):
    """From 100 steps on the first fiftieth is cut off; details of a validation set are not plotted."""
    from matplotlib.figure import Figure

    limits = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: limits.extend(self.axes[0].get_ylim()))
    lines = [{"step": s, "loss": 1 + 4 * math.exp(-s)} for s in range(steps)]
    lines[50]["evals"] = evals
    write_metrics(run, lines)
    plot_losses(run)
    if steps < 100:
        assert limits[1] >= 5
    else:
        assert limits == pytest.approx([1, 1.8 if evals else 1.6])


@pytest.mark.parametrize("steps", [49, 50])
def test_a_comparison_cuts_off_the_first_losses_of_long_runs(tmp_path, monkeypatch, steps):
    """Of 100 steps in all; the first twentieth of each run may be cut off, its validation is always shown."""
    from matplotlib.figure import Figure

    drawn = {}

    def collect(self, file, **options):
        axes = self.axes[0]
        drawn.update(
            {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}, limits=axes.get_ylim()
        )

    monkeypatch.setattr(Figure, "savefig", collect)
    runs = {}
    for name, least in (("one", 1.0), ("two", 2.0)):
        folder = make_run(tmp_path / name, P_VAL)
        lines = [{"step": s, "loss": least + 4 * math.exp(-s)} for s in range(steps)]
        lines[20]["evals"] = {"val_roam": least - 0.5, "val_chat": least - 0.5}
        write_metrics(RunFolder(folder), lines)
        runs[name] = RunInfo(folder)
    plot_comparison(runs, tmp_path / "out.png")
    assert [drawn[name] for name in runs] == [[[21, pytest.approx(0.5)]], [[21, pytest.approx(1.5)]]]
    if steps < 50:
        assert drawn["limits"][1] >= 6
    else:
        assert drawn["limits"] == pytest.approx((0, 3))


def test_a_constant_loss(run, recwarn):
    write_metrics(run, [{"step": s, "loss": 2.0} for s in range(200)])
    plot_losses(run)
    assert run.plot_path.read_bytes().startswith(b"\x89PNG")
    assert not recwarn.list


@settings(max_examples=40)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=130))
def test_smooth_is_a_running_mean(values):
    result = smooth(values)
    assert len(result) == len(values)
    for i, got in enumerate(result):
        width = max(1, min((i + 1) // 20, len(values) // 60))
        assert got == pytest.approx(sum(values[i + 1 - width : i + 1]) / width, abs=1e-6)
