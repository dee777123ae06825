"""Show the memorization law log P(z) = c1 log(epochs) + c2 log(tokens) + c3: as text, as PNG, as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from niels_gpt.memorization.law import Law, LawPoint
from niels_gpt.report.charts import LARGE_FONT, SMALL_FONT, SPINES, Series, line_chart, plain, save_png
from niels_gpt.report.html import COLORS, Cell, Column, Group, render, table
from niels_gpt.system.console import plural

_LN10 = math.log(10)
_FIGURE_SIZE = (11, 4.6)
_LEGEND_COLUMNS = 4
_MAX_EPOCH_TICKS = 10


def law_text(law: Law) -> list[str]:
    """Return the law, its standard errors, and which coefficients are not determined."""
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
        text = "unidentifiable" if value is None else f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")
        lines.append(f"c{i + 1} ({name}): {text}")
    r2 = "unknown" if law.r2 is None else f"{law.r2:.4f}"
    lines.append(f"R² {r2}, {plural(law.points, 'point')}")
    above = sum(value > 0 for value in law.fitted)
    if above:
        lines.append(f"{above:,} fitted values are above P(z) = 1: the law has no upper limit")
    return [*lines, *law.notes]


def _groups(points: Sequence[LawPoint]) -> list[tuple[str, list[int]]]:
    """Group the points by tokens, ascending: (label, indices), neighboring sizes together if there are many."""
    sizes = sorted({point.tokens for point in points})
    number = min(len(sizes), COLORS)
    groups = []
    for i in range(number):
        members = sizes[i * len(sizes) // number : (i + 1) * len(sizes) // number]
        label = f"{members[0]:,g}" if len(members) == 1 else f"{members[0]:,g} to {members[-1]:,g}"
        groups.append((f"{label} tokens", [j for j, point in enumerate(points) if point.tokens in members]))
    return groups


def _curves(points: Sequence[LawPoint], law: Law, members: list[int]) -> list[list[tuple[float, float]]]:
    """Return the curves of a group, one per number of tokens: lists of (epochs, fitted log10 P)."""
    curves: dict[float, dict[float, float]] = {}
    for j in members:
        curves.setdefault(points[j].tokens, {})[points[j].epochs] = law.fitted[j] / _LN10
    return [sorted(curve.items()) for curve in curves.values()]


def law_png(points: Sequence[LawPoint], law: Law, path: Path, *, title: str) -> None:
    """Write a PNG, atomically: P(z) over epochs colored by tokens, and measured against predicted."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=_FIGURE_SIZE, layout="constrained")
    over, against = figure.subplots(1, 2)
    groups = _groups(points)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(groups), 1)))
    for (label, members), color in zip(groups, colors, strict=True):
        measured = [points[j].log_p / _LN10 for j in members]
        over.plot([points[j].epochs for j in members], measured, "o", color=color, markersize=4.5, label=label)
        for curve in _curves(points, law, members):
            over.plot(*zip(*curve, strict=True), color=color, linewidth=1.1, alpha=0.8)
        against.plot([law.fitted[j] / _LN10 for j in members], measured, "o", color=color, markersize=4.5)
    ends = [value / _LN10 for p, fit in zip(points, law.fitted, strict=True) for value in (p.log_p, fit)]
    against.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    over.set_xscale("log")
    epochs = sorted({point.epochs for point in points})
    if len(epochs) <= _MAX_EPOCH_TICKS:  # the default labels of a short log axis overlap
        over.set_xticks(epochs, [f"{value:,g}" for value in epochs])
        over.minorticks_off()
    over.set_xlabel("epochs")
    over.set_ylabel("log10 P(z): measured (dots), law (lines)")
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=SMALL_FONT)
    against.set_xlabel("log10 P(z) by the law")
    against.set_ylabel("log10 P(z), measured")
    for axes in (over, against):
        axes.grid(alpha=0.25)
        axes.spines[SPINES].set_visible(False)
    r2 = "" if law.r2 is None else f", R² = {law.r2:.3f}"
    figure.suptitle(plain(f"{title}\n{law_text(law)[0]}{r2}"), fontsize=LARGE_FONT)
    save_png(figure, path)


def law_page(points: Sequence[LawPoint], law: Law, *, title: str) -> str:
    """Return a self-contained page: the law, both charts and all points."""
    over: list[Series] = []
    ends = [value / _LN10 for p, fit in zip(points, law.fitted, strict=True) for value in (p.log_p, fit)]
    edge = [min(ends), max(ends)]
    against = [Series("equal", edge, edge, color="ctl", style="dash", label="measured = law")]
    for i, (label, members) in enumerate(_groups(points)):
        epochs, measured = [points[j].epochs for j in members], [points[j].log_p / _LN10 for j in members]
        predicted = [law.fitted[j] / _LN10 for j in members]
        for curve in _curves(points, law, members):
            over.append(Series(label, [x for x, _ in curve], [y for _, y in curve], color=f"c{i}"))
        over.append(Series(label, epochs, measured, color=f"c{i}", label=label, line=False, dots=True))
        against.append(Series(label, predicted, measured, color=f"c{i}", label=label, line=False, dots=True))
    columns = [Column(name) for name in ("Epochs", "Tokens", "log P(z)", "by the law", "difference")]
    rows = []
    for point, fit in zip(points, law.fitted, strict=True):
        numbers = (point.epochs, point.tokens, point.log_p, fit, point.log_p - fit)
        texts = (f"{point.epochs:,g}", f"{point.tokens:,g}", *(f"{value:.3f}" for value in numbers[2:]))
        cells = [Cell(text, value) for text, value in zip(texts, numbers, strict=True)]
        rows.append([Cell(point.name), *cells] if any(p.name for p in points) else cells)
    if any(p.name for p in points):
        columns.insert(0, Column("Name", text=True))
    page = render(
        "law.html",
        title=title,
        lines=law_text(law),
        over_epochs=line_chart(
            over,
            title="Over epochs: measured (dots) and the law (lines)",
            x_label="epochs",
            y_label="P(z), geometric mean",
            x_scale="log",
            y_scale="exponent",
            y_high=0,
        ),
        against_law=line_chart(
            against, title="Measured against the law", x_label="log10 P(z) by the law", y_label="log10 P(z), measured"
        ),
        table=table(columns, [Group(rows)]),
    )
    return str(page)
