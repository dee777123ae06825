"""The training and validation loss of a run as curves: loss.png, and one picture of several runs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.report.charts import COLORS, Chart, Series, save_png
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import RunInfo
from niels_gpt.runs.metrics import selection_loss
from niels_gpt.training.progress import headline_evals

MIN_STEPS = 100
"""Shorter runs are plotted in full height, from their first loss."""
MOST_DOTS = 60
"""Evaluations of a line that are drawn with dots."""


EACH_STEP, SMOOTHED = "train, each step", "train, smoothed"


def loss_chart(lines: Sequence[Mapping[str, Any]], title: str, y_label: str, *, x_label: str = "steps") -> Chart:
    """Return the training loss of each step, the same smoothed, and the loss of each held-out set.

    The initial fall of a long run, from ln V, is not drawn.
    """
    steps, losses = [m["step"] for m in lines], [m["loss"] for m in lines]
    smoothed = smooth(losses)
    series = [
        Series(EACH_STEP, steps, losses, color="ctl", style="faint", label=EACH_STEP),
        Series(SMOOTHED, steps, smoothed, color="ctl", label=SMOOTHED),
    ]
    later = smoothed[len(smoothed) // 50 :]
    for number, name in enumerate(dict.fromkeys(name for m in lines for name in headline_evals(m.get("evals", {})))):
        points = [(m["step"], m["evals"][name]) for m in lines if name in m.get("evals", {})]
        color, style = f"c{number % COLORS}", "dash" if number >= COLORS else ""
        x, y = [step for step, _ in points], [value for _, value in points]
        series.append(Series(name, x, y, color=color, style=style, label=name, dots=len(x) <= MOST_DOTS))
        later += y
    return Chart(title, y_label, series, x_label=x_label, y_most=_highest_drawn(losses, later))


def _highest_drawn(losses: Sequence[float], later: Sequence[float]) -> float:
    """Return the highest loss that is drawn, so that the later ones fill the chart; of short runs, all are."""
    if len(losses) < MIN_STEPS:
        return math.inf
    low, high = min(*losses, *later), max(later)
    return high + 0.05 * (high - low) if low < high else math.inf


def plot_losses(run: RunFolder) -> None:
    """Plot metrics.jsonl as loss.png; do nothing if it has no loss."""
    lines = [m for m in run.metrics() if "loss" in m]
    if not lines:
        return
    save_png([loss_chart(lines, run.path.name, "loss (nats per token)", x_label="step")], run.plot_path)


def selection_curve(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return the steps, from 1, and the validation losses that select the best checkpoint."""
    points = []
    for m in lines:
        with contextlib.suppress(KeyError):
            points.append((m["step"] + 1, selection_loss(config, m["evals"])))
    return [step for step, _ in points], [value for _, value in points]


def plot_comparison(runs: Mapping[str, RunInfo], path: Path) -> None:
    """Draw the losses of runs, by name, as one PNG: a color each, training thin, validation thick with dots.

    The validation loss is the one that selects the best checkpoint. Raises ValueError if no run has a loss.
    """
    units, series, shown, start = set(), [], [], []
    for number, (name, run) in enumerate(runs.items()):
        lines = [m for m in run.lines if "loss" in m]
        units.add(run.unit)
        losses = smooth([m["loss"] for m in lines])
        x, y = selection_curve(run.tree, lines)
        color, style = f"c{number % COLORS}", " dash" if number >= COLORS else ""
        series.append(Series(name, [m["step"] + 1 for m in lines], losses, color=color, style=f"faint{style}"))
        series.append(Series(name, x, y, color=color, style=style, label=name, dots=True))
        shown += [*losses[len(losses) // 20 :], *y]
        start += losses
    if not shown:
        raise ValueError(f"none of these runs has a loss yet: {', '.join(runs)}")
    title, label = "thin: training, smoothed; with dots: validation", f"loss (nats per {' or '.join(sorted(units))})"
    save_png([Chart(title, label, series, x_label="step", y_most=_highest_drawn(start, shown))], path)


def smooth(values: list[float]) -> list[float]:
    """Return running means over the last 1/20 of the steps so far, at most 1/60 of the run (early losses fall fast)."""
    sums = [0.0, *itertools.accumulate(values)]
    most = max(len(values) // 60, 1)
    widths = (min(max(end // 20, 1), most) for end in range(1, len(sums)))
    return [(sums[end] - sums[end - width]) / width for end, width in enumerate(widths, 1)]
