"""Show the memorization law log P(z) = c1 log(epochs) + c2 log(tokens) + c3: as text, as PNG, as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from niels_gpt.memorization.law import Law, LawPoint
from niels_gpt.report.charts import COLORS, Chart, Series, save_png
from niels_gpt.report.document import Cell, Charts, Column, Document, Items, Lead, Paragraph, Section, Table, html_page
from niels_gpt.system.console import plural

_LN10 = math.log(10)


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


def _charts(points: Sequence[LawPoint], law: Law) -> list[Chart]:
    """Return P(z) over epochs, with the law, and measured against predicted; the color is that of the tokens."""
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
    return [
        Chart(
            "Over epochs: measured (dots) and the law (lines)",
            "P(z), geometric mean",
            over,
            x_label="epochs",
            x_scale="log",
            y_scale="exponent",
            y_high=0,
        ),
        Chart("Measured against the law", "log10 P(z), measured", against, x_label="log10 P(z) by the law"),
    ]


def law_png(points: Sequence[LawPoint], law: Law, path: Path, *, title: str) -> None:
    """Write both charts as a PNG, atomically."""
    r2 = "" if law.r2 is None else f", R² = {law.r2:.3f}"
    save_png(_charts(points, law), path, title=f"{title}\n{law_text(law)[0]}{r2}", panel=(5.5, 3.4))


def law_page(points: Sequence[LawPoint], law: Law, *, title: str) -> str:
    """Return a self-contained page: the law, both charts and all points."""
    named = any(point.name for point in points)
    columns = [Column(name) for name in ("Epochs", "Tokens", "log P(z)", "by the law", "difference")]
    rows = []
    for point, fit in zip(points, law.fitted, strict=True):
        numbers = (point.epochs, point.tokens, point.log_p, fit, point.log_p - fit)
        texts = (f"{point.epochs:,g}", f"{point.tokens:,g}", *(f"{value:.3f}" for value in numbers[2:]))
        cells = [Cell(text, value) for text, value in zip(texts, numbers, strict=True)]
        rows.append([Cell(point.name), *cells] if named else cells)
    first, *rest = law_text(law)
    about = "P(z) is the probability of a suffix given its prompt; a point is the mean of log P(z) (nats)."
    sections = [
        Section("", [Lead([first]), Items(rest), Charts(_charts(points, law)), Paragraph(about)]),
        Section("Points", [Table([Column("Name", text=True), *columns] if named else columns, rows)]),
    ]
    return html_page(Document(title, "", sections))
