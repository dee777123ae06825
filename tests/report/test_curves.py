import io
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.report.curves import plot_losses, smooth
from niels_gpt.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    return folder


def write_metrics(run, lines, tail=""):
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")


def test_nothing_to_draw(run):
    plot_losses(run)
    assert not run.plot_path.exists()
    write_metrics(run, [])
    plot_losses(run)
    assert not run.plot_path.exists()


def test_nothing_is_made_where_there_is_no_run(tmp_path):
    plot_losses(RunFolder(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_a_picture(run, steps):
    write_metrics(run, [{"step": s, "loss": 5 - s / 50} for s in range(steps)], tail='{"step": 99, "lo')
    plot_losses(run)
    data = run.plot_path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300
    assert sorted(path.name for path in run.path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_what_is_drawn(run, monkeypatch):
    from matplotlib.figure import Figure

    drawn = {}

    def keep(self, file, **options):
        axes = self.axes[0]
        drawn.update({line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()})
        drawn["title"] = axes.get_title()
        drawn["limits"] = axes.get_ylim()
        file.write(b"picture")

    monkeypatch.setattr(Figure, "savefig", keep)
    lines = [{"step": s, "loss": 5.0 - s} for s in range(4)]
    lines[1]["evals"] = {"val_wiki": 4.5}
    lines[3]["evals"] = {"val_wiki": 2.5, "val_roam": 2.0}
    write_metrics(run, lines)
    plot_losses(run)
    assert drawn.pop("title") == "my run"
    assert drawn.pop("limits")[1] > 5.0
    assert drawn.pop("train, each step") == [[s, 5.0 - s] for s in range(4)]
    assert [x for x, _ in drawn.pop("train, smoothed")] == [0, 1, 2, 3]
    assert drawn == {"val_wiki": [[1, 4.5], [3, 2.5]], "val_roam": [[3, 2.0]]}
    assert run.plot_path.read_bytes() == b"picture"


def test_the_first_losses_of_a_long_run_take_no_room(run, monkeypatch):
    from matplotlib.figure import Figure

    limits = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: limits.extend(self.axes[0].get_ylim()))
    lines = [{"step": s, "loss": 1 + 4 * math.exp(-s) + (s == 700) * 0.5} for s in range(1000)]
    lines[500]["evals"] = {"val_wiki": 1.8, "val_wiki/detail": 9.0}
    write_metrics(run, lines)
    plot_losses(run)
    assert limits == pytest.approx([1 - 0.04, 1.8 + 0.04])


def test_a_loss_that_never_changes_is_drawn(run, recwarn):
    write_metrics(run, [{"step": s, "loss": 2.0} for s in range(200)])
    plot_losses(run)
    assert run.plot_path.read_bytes().startswith(b"\x89PNG")
    assert not recwarn.list


def test_the_picture_of_a_resumed_run_replaces_the_old(run):
    write_metrics(run, [{"step": 0, "loss": 5.0}])
    plot_losses(run)
    first = run.plot_path.read_bytes()
    write_metrics(run, [{"step": s, "loss": 5.0 - s} for s in range(5)])
    plot_losses(run)
    assert run.plot_path.read_bytes() != first


def test_drawing_needs_no_screen(run, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    write_metrics(run, [{"step": 0, "loss": 5.0}])
    plot_losses(run)
    assert io.BytesIO(run.plot_path.read_bytes()).read(4) == b"\x89PNG"


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=120))
def test_smooth_is_the_mean_of_the_last_ones(values):
    result = smooth(values)
    assert len(result) == len(values)
    for i, got in enumerate(result):
        width = max(1, min((i + 1) // 20, len(values) // 60))
        assert got == pytest.approx(sum(values[i + 1 - width : i + 1]) / width, abs=1e-6)


def test_smooth_follows_a_fall():
    """A loss that has halved ten steps ago is not shown as it was."""
    values = [8.0] * 30 + [4.0] * 6000
    assert smooth(values)[40] == 4.0


@pytest.mark.parametrize("n", [1, 5, 20, 21, 400])
def test_smooth_keeps_a_constant(n):
    assert smooth([3.5] * n) == pytest.approx([3.5] * n)
