"""The training and validation loss of a run as curves: loss.png, and one picture of several runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.report.charts import FIGURE_SIZE, plain, save_png
from niels_gpt.runs.catalog import read_tree
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.validation import is_over_bytes, selection_loss
from niels_gpt.training.progress import headline_evals

MIN_STEPS = 100
"""Shorter runs are plotted in full height, from their first loss."""


class Curve(NamedTuple):
    """A line over the steps of a run."""

    name: str
    steps: list[int]
    values: list[float]


EACH_STEP, SMOOTHED = "train, each step", "train, smoothed"


def loss_curves(lines: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return the training loss of each step, the same smoothed, and the loss of each held-out set."""
    steps, losses = [m["step"] for m in lines], [m["loss"] for m in lines]
    curves = [Curve(EACH_STEP, steps, losses), Curve(SMOOTHED, steps, smooth(losses))]
    for name in dict.fromkeys(name for m in lines for name in headline_evals(m.get("evals", {}))):
        points = [(m["step"], m["evals"][name]) for m in lines if name in m.get("evals", {})]
        curves.append(Curve(name, [step for step, _ in points], [value for _, value in points]))
    return curves


def loss_limits(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Return the range of losses that is worth drawing, without the initial fall from ln V; None: all of it."""
    each_step, smoothed, *evaluations = curves
    if len(each_step.values) < MIN_STEPS:
        return None
    later = smoothed.values[len(smoothed.values) // 50 :]
    later += [value for curve in evaluations for value in curve.values]
    low, high = min(each_step.values + later), max(later)
    margin = 0.05 * (high - low)
    return (low - margin, high + margin) if low < high else None


def plot_losses(run: RunFolder) -> None:
    """Plot metrics.jsonl as loss.png; do nothing if it has no loss."""
    lines = [m for m in run.metrics() if "loss" in m]
    if not lines:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    axes = figure.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        EACH_STEP: {"color": "0.75", "linewidth": 0.8},
        SMOOTHED: {"color": "black", "linewidth": 1.4},
    }
    curves = loss_curves(lines)
    for number, (name, steps, values) in enumerate(curves):
        evaluation: dict[str, Any] = {"marker": "o", "markersize": 3.0, "linewidth": 1.2}
        style = styles[name] if number < len(styles) else evaluation
        axes.plot(steps, values, label=plain(name), **style)
    if (limits := loss_limits(curves)) is not None:
        axes.set_ylim(*limits)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(plain(run.path.name))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_png(figure, run.plot_path)


def selection_curve(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the validation loss that selects the best checkpoint; steps are counted from 1."""
    points = []
    for m in lines:
        with contextlib.suppress(KeyError):
            points.append((m["step"] + 1, selection_loss(config, m["evals"])))
    return Curve("validation", [step for step, _ in points], [value for _, value in points])


def plot_comparison(runs: Mapping[str, Path], path: Path) -> None:
    """Draw the losses of runs, by name, as one PNG: a color each, training thin, validation thick with dots.

    The validation loss is the one that selects the best checkpoint. Raises ValueError if no run has a loss.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    axes = figure.add_subplot()
    units, shown, start = set(), [], []
    for number, (name, folder) in enumerate(runs.items()):
        config = read_tree(folder)
        lines = [m for m in RunFolder(folder).metrics() if "loss" in m]
        units.add("byte" if is_over_bytes(config) else "token")
        losses = smooth([m["loss"] for m in lines])
        _, x, y = selection_curve(config, lines)
        color = f"C{number}"
        axes.plot([m["step"] + 1 for m in lines], losses, color=color, linewidth=0.8, alpha=0.55)
        axes.plot(x, y, color=color, marker="o", markersize=3.0, linewidth=1.6, label=plain(name))
        shown += [*losses[len(losses) // 20 :], *y]
        start += losses
    if not shown:
        raise ValueError(f"none of these runs has a loss yet: {', '.join(runs)}")
    if len(start) >= MIN_STEPS and min(shown) < max(shown):  # cut off the initial fall from ln V
        margin = 0.05 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {' or '.join(sorted(units))})")
    axes.set_title("thin: training, smoothed; with dots: validation")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_png(figure, path)


def smooth(values: list[float]) -> list[float]:
    """Return running means over the last 1/20 of the steps so far, at most 1/60 of the run (early losses fall fast)."""
    sums = [0.0, *itertools.accumulate(values)]
    most = max(len(values) // 60, 1)
    widths = (min(max(end // 20, 1), most) for end in range(1, len(sums)))
    return [(sums[end] - sums[end - width]) / width for end, width in enumerate(widths, 1)]
