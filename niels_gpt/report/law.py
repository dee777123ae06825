"""The law of memorisation: log P(z) = c1 log(epochs) + c2 log(tokens) + c3, fitted, told and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from niels_gpt.report.charts import Series, line_chart, save_png
from niels_gpt.report.html import (
    COLOURS,
    Cell,
    Column,
    Group,
    escape,
    page,
    paragraph,
    table,
)
from niels_gpt.system.console import plural

_LN10 = math.log(10)


@dataclass(frozen=True)
class LawPoint:
    """One measurement: after how many epochs, of a document of how many tokens, which mean of log P(z) (in nats)."""

    epochs: float
    tokens: float
    log_p: float
    name: str = ""


@dataclass(frozen=True)
class Law:
    """The fit. A coefficient is None where the points cannot tell it, an error where nothing is left to judge by."""

    c1: float | None
    c2: float | None
    c3: float | None
    errors: tuple[float | None, float | None, float | None]
    """Standard errors of c1, c2, c3."""
    r2: float | None
    points: int
    rank: int
    """How many coefficients the points tell apart."""
    fitted: tuple[float, ...]
    """log P(z) by the law, for each point."""
    notes: tuple[str, ...] = ()
    """What could not be told, and why."""


def fit_law(points: Sequence[LawPoint]) -> Law:
    """Least squares in the logarithms; raises ValueError for no points or numbers without a logarithm.

    Where all points have the same epochs (or tokens), that coefficient is None, and c3 holds its contribution. Where
    log(tokens) is a linear function of log(epochs), no coefficient can be told, though the fitted values can.
    """
    if not points:
        raise ValueError("no points to fit the law to: measure at least one checkpoint of one document")
    for point in points:
        if not (point.epochs > 0 and point.tokens > 0 and math.isfinite(point.epochs * point.tokens * point.log_p)):
            named = f" ({point.name})" if point.name else ""
            raise ValueError(
                f"the law needs positive epochs and tokens and a finite log P(z), not epochs={point.epochs}, "
                f"tokens={point.tokens}, log_p={point.log_p}{named}: leave this point out"
            )
    logs = np.log(np.array([[p.epochs, p.tokens] for p in points], dtype=np.float64))
    y = np.array([p.log_p for p in points], dtype=np.float64)
    varies = np.ptp(logs, axis=0) > 1e-12 * np.maximum(np.abs(logs).max(axis=0), 1)
    used = np.flatnonzero(varies)
    notes = [
        f"c{i + 1} is unidentifiable: all points have the same {what} ({same:,g}); c3 holds its part"
        for i, (what, same) in enumerate((("epochs", points[0].epochs), ("tokens", points[0].tokens)))
        if not varies[i]
    ]
    centre, y_mean = logs[:, used].mean(axis=0), float(y.mean())
    design = logs[:, used] - centre
    scale = np.sqrt((design**2).sum(axis=0))
    # Centred columns of length one: the rank is then a matter of angles, whatever the units.
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
        values[2] = y_mean - float(centre @ slopes)
        if left > 0:
            inverse = np.linalg.inv(design.T @ design) if len(used) else np.zeros((0, 0))
            for place, i in enumerate(used):
                errors[i] = math.sqrt(residual / left * inverse[place, place])
            errors[2] = math.sqrt(residual / left * (1 / len(points) + float(centre @ inverse @ centre)))
    if left <= 0:
        notes.append(f"as many coefficients as points ({rank}): nothing is left to judge the fit by")
    r2 = 1 - residual / spread if left > 0 and spread > 1e-24 * float((y**2).sum()) else None
    c1, c2, c3 = values
    return Law(
        c1, c2, c3, (errors[0], errors[1], errors[2]), r2, len(points), rank, tuple(fitted.tolist()), tuple(notes)
    )


def law_text(law: Law) -> list[str]:
    """The law, its errors, and what could not be told."""
    names = ("log(epochs)", "log(tokens)", "")
    terms: list[str] = []
    for value, name in zip((law.c1, law.c2, law.c3), names, strict=True):
        if value is not None:
            sign = ("-" if value < 0 else "") if not terms else (" - " if value < 0 else " + ")
            terms.append(f"{sign}{abs(value):.4g}{' ' + name if name else ''}")
    lines = (
        [f"log P(z) = {''.join(terms)}"] if terms else ["log P(z): no coefficient is identifiable from these points"]
    )
    for i, (value, name) in enumerate(zip((law.c1, law.c2, law.c3), (*names[:2], "constant"), strict=True)):
        error = law.errors[i]
        told = "unidentifiable" if value is None else f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")
        lines.append(f"c{i + 1} ({name}): {told}")
    r2 = "unknown" if law.r2 is None else f"{law.r2:.4f}"
    lines.append(f"R² {r2}, {plural(law.points, 'point')}")
    above = sum(value > 0 for value in law.fitted)
    if above:
        lines.append(f"{above:,} fitted values are above P(z) = 1: the law does not know that it must level off there")
    return [*lines, *law.notes]


def _groups(points: Sequence[LawPoint]) -> list[tuple[str, list[int]]]:
    """The points by tokens, ascending: a group per number, or neighbouring numbers together where there are many."""
    sizes = sorted({point.tokens for point in points})
    number = min(len(sizes), COLOURS)
    groups = []
    for i in range(number):
        members = sizes[i * len(sizes) // number : (i + 1) * len(sizes) // number]
        label = f"{members[0]:,g}" if len(members) == 1 else f"{members[0]:,g} to {members[-1]:,g}"
        groups.append((f"{label} tokens", [j for j, point in enumerate(points) if point.tokens in members]))
    return groups


def _curves(points: Sequence[LawPoint], law: Law, members: list[int]) -> list[list[tuple[float, float]]]:
    """(epochs, fitted log10 P) of a group, a curve for each number of tokens in it."""
    curves: dict[float, dict[float, float]] = {}
    for j in members:
        curves.setdefault(points[j].tokens, {})[points[j].epochs] = law.fitted[j] / _LN10
    return [sorted(curve.items()) for curve in curves.values()]


def law_png(points: Sequence[LawPoint], law: Law, path: Path, *, title: str) -> None:
    """Measured against predicted, and P(z) over epochs coloured by tokens; written whole or not at all."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    over, against = figure.subplots(1, 2)
    groups = _groups(points)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(groups), 1)))
    for (label, members), colour in zip(groups, colours, strict=True):
        measured = [points[j].log_p / _LN10 for j in members]
        over.plot([points[j].epochs for j in members], measured, "o", color=colour, markersize=4.5, label=label)
        for curve in _curves(points, law, members):
            over.plot(*zip(*curve, strict=True), color=colour, linewidth=1.1, alpha=0.8)
        against.plot([law.fitted[j] / _LN10 for j in members], measured, "o", color=colour, markersize=4.5)
    ends = [value / _LN10 for p, fit in zip(points, law.fitted, strict=True) for value in (p.log_p, fit)]
    against.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", linewidth=1, linestyle="--", zorder=0)
    over.set_xscale("log")
    epochs = sorted({point.epochs for point in points})
    if len(epochs) <= 10:  # the default labels of a short logarithmic axis run into each other
        over.set_xticks(epochs, [f"{value:,g}" for value in epochs])
        over.minorticks_off()
    over.set_xlabel("epochs")
    over.set_ylabel("log10 P(z): measured (dots), law (lines)")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    against.set_xlabel("log10 P(z) by the law")
    against.set_ylabel("log10 P(z), measured")
    for axes in (over, against):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    r2 = "" if law.r2 is None else f", R² = {law.r2:.3f}"
    figure.suptitle(f"{title}\n{law_text(law)[0]}{r2}".replace("$", r"\$"), fontsize=10)
    save_png(figure, path)


def law_page(points: Sequence[LawPoint], law: Law, *, title: str) -> str:
    """The law, both charts and all points, as a page that needs nothing else."""
    over: list[Series] = []
    ends = [value / _LN10 for p, fit in zip(points, law.fitted, strict=True) for value in (p.log_p, fit)]
    edge = [min(ends), max(ends)]
    against = [Series("equal", edge, edge, colour="ctl", style="dash", label="measured = law")]
    for i, (label, members) in enumerate(_groups(points)):
        epochs, measured = [points[j].epochs for j in members], [points[j].log_p / _LN10 for j in members]
        predicted = [law.fitted[j] / _LN10 for j in members]
        for curve in _curves(points, law, members):
            over.append(Series(label, [x for x, _ in curve], [y for _, y in curve], colour=f"c{i}"))
        over.append(Series(label, epochs, measured, colour=f"c{i}", label=label, line=False, dots=True))
        against.append(Series(label, predicted, measured, colour=f"c{i}", label=label, line=False, dots=True))
    first, *rest = law_text(law)
    columns = [Column(name) for name in ("Epochs", "Tokens", "log P(z)", "by the law", "difference")]
    rows = []
    for point, fit in zip(points, law.fitted, strict=True):
        numbers = (point.epochs, point.tokens, point.log_p, fit, point.log_p - fit)
        texts = (f"{point.epochs:,g}", f"{point.tokens:,g}", *(f"{value:.3f}" for value in numbers[2:]))
        cells = [Cell(text, value) for text, value in zip(texts, numbers, strict=True)]
        rows.append([Cell(point.name), *cells] if any(p.name for p in points) else cells)
    if any(p.name for p in points):
        columns.insert(0, Column("Name", text=True))
    return page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f'<div class="lead"><p>{escape(first)}</p></div>',
            "<ul>",
            *(f"<li>{escape(line)}</li>" for line in rest),
            "</ul>",
            '<div class="grid">',
            line_chart(
                over,
                title="Over epochs: measured (dots) and the law (lines)",
                x_label="epochs",
                y_label="P(z), geometric mean",
                x_scale="log",
                y_scale="exponent",
                y_high=0,
            ),
            line_chart(
                against,
                title="Measured against the law",
                x_label="log10 P(z) by the law",
                y_label="log10 P(z), measured",
            ),
            "</div>",
            paragraph("P(z) is the probability of a suffix given its prompt; a point is the mean of log P(z) (nats)."),
            "<h2>Points</h2>",
            table(columns, [Group(rows)]),
        ],
    )
