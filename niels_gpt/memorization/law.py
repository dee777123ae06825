"""The memorization law log P(z) = c1 log(epochs) + c2 log(tokens) + c3: its points, and a least-squares fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from niels_gpt.system.checked_json import read_checked_json
from niels_gpt.system.program import command


@dataclass(frozen=True)
class LawPoint:
    """One measurement: the mean log P(z) in nats of documents of `tokens` tokens after `epochs` epochs."""

    epochs: float
    tokens: float
    log_p: float
    name: str = ""


@dataclass(frozen=True)
class Law:
    """A fit. A coefficient is None if the points do not determine it, its error if no degree of freedom is left."""

    c1: float | None
    c2: float | None
    c3: float | None
    errors: tuple[float | None, float | None, float | None]
    """Standard errors of c1, c2, c3."""
    r2: float | None
    points: int
    rank: int
    """Number of coefficients that the points determine."""
    fitted: tuple[float, ...]
    """log P(z) by the law, one per point."""
    notes: tuple[str, ...] = ()
    """Which coefficients are not determined, and why."""


def fit_law(points: Sequence[LawPoint]) -> Law:
    """Fit the law by least squares in the logarithms.

    If all points have the same epochs (or tokens), that coefficient is None, and c3 contains its contribution. If
    log(tokens) is a linear function of log(epochs), no coefficient is determined, but the fitted values are.
    Raises ValueError for no points, and for values without a finite logarithm.
    """
    if not points:
        raise ValueError("no points to fit: measure at least one checkpoint of one document")
    for point in points:
        if not (point.epochs > 0 and point.tokens > 0 and math.isfinite(point.epochs * point.tokens * point.log_p)):
            named = f" ({point.name})" if point.name else ""
            raise ValueError(
                f"the law needs positive epochs and tokens and a finite log P(z), got epochs={point.epochs}, "
                f"tokens={point.tokens}, log_p={point.log_p}{named}: drop this point"
            )
    logs = np.log(np.array([[p.epochs, p.tokens] for p in points], dtype=np.float64))
    y = np.array([p.log_p for p in points], dtype=np.float64)
    varies = np.ptp(logs, axis=0) > 1e-12 * np.maximum(np.abs(logs).max(axis=0), 1)
    used = np.flatnonzero(varies)
    notes = [
        f"c{i + 1} is unidentifiable: all points have the same {what} ({same:,g}); c3 contains its contribution"
        for i, (what, same) in enumerate((("epochs", points[0].epochs), ("tokens", points[0].tokens)))
        if not varies[i]
    ]
    center, y_mean = logs[:, used].mean(axis=0), float(y.mean())
    design = logs[:, used] - center
    scale = np.sqrt((design**2).sum(axis=0))
    # Columns are centered and have length one, so that the rank depends on angles only, not on units.
    slopes, _, slope_rank, _ = np.linalg.lstsq(design / scale, y - y_mean, rcond=1e-9)
    fitted = design / scale @ slopes + y_mean
    slopes, rank = slopes / scale, int(slope_rank) + 1
    residual, spread = float(((y - fitted) ** 2).sum()), float(((y - y_mean) ** 2).sum())
    values: list[float | None] = [None, None, None]
    errors: list[float | None] = [None, None, None]
    left = len(points) - rank
    if slope_rank < len(used):
        notes.append(
            "c1, c2 and c3 are unidentifiable: log(tokens) is a linear function of log(epochs) in these points"
        )
    else:
        for i, slope in zip(used, slopes, strict=True):
            values[i] = float(slope)
        values[2] = y_mean - float(center @ slopes)
        if left > 0:
            inverse = np.linalg.inv(design.T @ design) if len(used) else np.zeros((0, 0))
            for k, i in enumerate(used):
                errors[i] = math.sqrt(residual / left * inverse[k, k])
            errors[2] = math.sqrt(residual / left * (1 / len(points) + float(center @ inverse @ center)))
    if left <= 0:
        notes.append(f"as many coefficients as points ({rank}): the quality of the fit is unknown")
    r2 = 1 - residual / spread if left > 0 and spread > 1e-24 * float((y**2).sum()) else None
    c1, c2, c3 = values
    return Law(
        c1, c2, c3, (errors[0], errors[1], errors[2]), r2, len(points), rank, tuple(fitted.tolist()), tuple(notes)
    )


def law_points(run: Path) -> list[LawPoint]:
    """Return the checkpoints of a measured run as points. Raises ValueError if the run was not measured."""
    path = run / "memorization" / "report.json"
    if not run.is_dir():
        raise ValueError(f"no run {run}")
    points: list[LawPoint] = []
    try:
        report = read_checked_json(path)
        tokens, checkpoints = report["train_tokens"], report["checkpoints"]
        for checkpoint in checkpoints:
            trained = [d["mean_log_p"] for d in checkpoint["documents"] if not d["control"]]
            if checkpoint["epochs"] > 0 and trained:
                name = f"{run.name}, step {checkpoint['step']}"
                points.append(LawPoint(checkpoint["epochs"], tokens, float(np.mean(trained)), name))
    except FileNotFoundError:
        raise ValueError(f"{run} was not measured: run {command('research', 'memorize', run)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError) as err:
        raise ValueError(
            f"{path} is not the report of a splice run ({err!r}): measure the run again with "
            f"{command('research', 'memorize', run)}"
        ) from None
    return points
