"""loss.png: training and validation loss of a run."""

from __future__ import annotations

import io
import itertools

from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import files
from niels_gpt.training.progress import headline_evals

WHOLE = 100
"""Shorter runs are drawn from their first loss on."""


def plot_losses(run: RunFolder) -> None:
    """Draw metrics.jsonl into loss.png; nothing if there is nothing to draw."""
    lines = [m for m in run.metrics() if "loss" in m]
    if not lines:
        return
    from matplotlib.figure import Figure

    steps = [m["step"] for m in lines]
    losses = [m["loss"] for m in lines]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="train, each step")
    smoothed = smooth(losses)
    axes.plot(steps, smoothed, color="black", linewidth=1.4, label="train, smoothed")
    names = dict.fromkeys(name for m in lines for name in headline_evals(m.get("evals", {})))
    for name in names:
        points = [(m["step"], m["evals"][name]) for m in lines if name in m.get("evals", {})]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
    if len(lines) >= WHOLE:  # the fall from ln V takes no room from what comes after it
        later = [
            *smoothed[len(lines) // 50 :],
            *(value for m in lines for value in headline_evals(m.get("evals", {})).values()),
        ]
        low, high = min(losses + later), max(later)
        if low < high:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run.path.name)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    files.write_bytes(run.plot_path, picture.getvalue())


def smooth(values: list[float]) -> list[float]:
    """The mean of the last twentieth of the steps so far, at most a sixtieth of the run: early on a loss falls fast."""
    sums = [0.0, *itertools.accumulate(values)]
    most = max(len(values) // 60, 1)
    widths = (min(max(end // 20, 1), most) for end in range(1, len(sums)))
    return [(sums[end] - sums[end - width]) / width for end, width in enumerate(widths, 1)]
