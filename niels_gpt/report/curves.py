"""loss.png: training and validation loss of a run."""

from __future__ import annotations

import io

from niels_gpt import files
from niels_gpt.train.progress import shown
from niels_gpt.train.run_folder import RunFolder


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
    axes.plot(steps, smooth(losses), color="black", linewidth=1.4, label="train, smoothed")
    names = dict.fromkeys(name for m in lines for name in shown(m.get("evals", {})))
    for name in names:
        points = [(m["step"], m["evals"][name]) for m in lines if name in m.get("evals", {})]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run.path.name)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    files.write_bytes(run.plot_path, picture.getvalue())


def smooth(values: list[float]) -> list[float]:
    """A running mean that forgets over about a sixtieth of the run, unbiased at its beginning."""
    keep = 1 - 1 / max(len(values) / 60, 1)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
