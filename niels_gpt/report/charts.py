"""Charts as inline SVG: lines or dots over linear and logarithmic axes, and bars. Also writes PNG files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from markupsafe import Markup

from niels_gpt.report.html import escape, render
from niels_gpt.report.numbers import power, shorten
from niels_gpt.system import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_SIZE = (8, 4.5)
"""Inches of a PNG with one plot."""
SMALL_FONT, MEDIUM_FONT, LARGE_FONT = 8, 9, 10
SPINES = ["top", "right"]
"""Edges of a PNG plot that are hidden."""

Scale = Literal["linear", "log", "exponent"]
"""Scale of an axis; with "exponent" the values are exponents of ten (log10), and the labels are the powers."""


@dataclass(frozen=True)
class Series:
    """A line of a chart. `name` shows on hover, `label` in the legend ("" for none); `color` is c0, c1, ... or ctl."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    color: str = "c0"
    label: str = ""
    line: bool = True
    dots: bool = False
    style: str = ""
    """ "dash", "faint" or both."""


class _Axis:
    """Maps values to fractions of an axis, 0 at the low end and 1 at the high end, and chooses labeled ticks."""

    def __init__(
        self,
        values: np.ndarray,
        scale: Scale,
        low: float | None,
        high: float | None,
        *,
        widen: bool,
        whole: bool = False,
    ) -> None:
        self.scale = scale
        known = self.transform(values)
        known = known[np.isfinite(known)]
        ends = [float(self.transform(np.array([end]))[0]) for end in (low, high) if end is not None]
        known = np.concatenate([known, ends]) if len(known) or ends else np.array([0.0, 1.0])
        self.low, self.high = float(known.min()), float(known.max())
        if self.high - self.low < 1e-12 * max(abs(self.high), 1e-290):
            pad = 0.5 if scale != "linear" else max(abs(self.high) * 0.5, 1e-9)
            self.low, self.high = self.low - pad * (low is None), self.high + pad
        span = self.high - self.low
        step = max(1.0, _round_up(span / 6, (1, 2, 3, 5, 10))) if scale != "linear" else _round_up(span / 4)
        if whole:
            step = max(1.0, _round_up(span / 4, (1, 2, 5, 10)))
        if widen:
            self.low, self.high = math.floor(self.low / step + 1e-9) * step, math.ceil(self.high / step - 1e-9) * step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        self.ticks = [(i * step, self.label(i * step, step)) for i in range(first, last + 1)]
        if scale == "log" and span < 1.6:  # decades alone would give one label or none
            fine = [(10.0**e * m) for e in range(math.floor(self.low), math.ceil(self.high) + 1) for m in (1, 2, 5)]
            self.ticks = [
                (math.log10(v), f"{v:,.12g}") for v in fine if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9
            ]

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Return log10 of the values on a log axis, else the values."""
        if self.scale != "log":
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values)

    def label(self, at: float, step: float) -> str:
        """Return the label of a tick, with the digits that `step` needs."""
        if self.scale == "linear":
            digits = len(f"{step:.12f}".rstrip("0").partition(".")[2])
            return f"{at + 0.0:,.{digits}f}"
        return f"{10**at:,.12g}" if -3 <= at <= 3 else power(at)

    def fraction(self, at: float) -> float:
        """Return the fraction of a transformed value, such as a tick."""
        return (at - self.low) / (self.high - self.low)

    def fractions(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the fractions of values, clipped to the axis."""
        transformed = self.transform(np.asarray(values, dtype=np.float64))
        return (np.clip(transformed, self.low, self.high) - self.low) / (self.high - self.low)


def _round_up(step: float, digits: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """Return the smallest of the digits times a power of ten that is at least `step`."""
    base = 10.0 ** math.floor(math.log10(step))
    return next(base * digit for digit in digits if base * digit >= step * (1 - 1e-9))


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
    y_low: float | None = None,
    y_high: float | None = None,
    x_ticks: Sequence[tuple[float, str]] = (),
    x_whole: bool = False,
    key: bool = True,
    size: tuple[int, int] = (480, 270),
    description: str = "",
) -> Markup:
    """Return a figure with lines or dots over common axes and a legend; points that are not finite are skipped.

    x_whole: label whole numbers only, since x counts tokens or steps. description: what the lines show, in words, for
    those who do not see them.
    """
    width, height = size
    x_axis = _Axis(_concatenate([s.x for s in series]), x_scale, None, None, widen=False, whole=x_whole)
    if x_ticks:
        x_axis.ticks = [(float(x_axis.transform(np.array([at]))[0]), label) for at, label in x_ticks]
    y_axis = _Axis(_concatenate([s.y for s in series]), y_scale, y_low, y_high, widen=True)
    left, right, top, bottom = 12 + 7 * max(len(label) for _, label in y_axis.ticks), width - 14, 24, height - 38
    across, down = right - left, bottom - top
    x_ticks = [(left + across * x_axis.fraction(at), label) for at, label in x_axis.ticks]
    lines = []
    for line in series:
        xs, ys = left + across * x_axis.fractions(line.x), bottom - down * y_axis.fractions(line.y)
        points = [(x, y) if math.isfinite(x + y) else None for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
        dots = [point for point in points if point] if line.dots else []
        lines.append((line, _path(points) if line.line else "", dots))
    return render(
        "line_chart.html",
        title=title,
        description=description,
        x_label=x_label,
        y_label=y_label,
        width=width,
        height=height,
        left=left,
        right=right,
        bottom=bottom,
        y_ticks=[(bottom - down * y_axis.fraction(at), label) for at, label in y_axis.ticks],
        x_marks=[x for x, _ in x_ticks],
        x_labels=_spaced_labels(x_ticks, width),
        lines=lines,
        key=chart_key(series) if key else "",
    )


def _spaced_labels(ticks: Sequence[tuple[float, str]], width: int) -> list[tuple[float, str, str]]:
    """Return (x, text-anchor, label) of the tick labels, without those that would overlap the previous one."""
    labels, edge = [], -1.0
    for x, label in ticks:
        half = 3.6 * len(label)
        if x - half > edge and x - half >= 0:
            edge = x + half + 8
            labels.append((float(width - 2), "end", label) if x + half > width - 2 else (x, "middle", label))
    return labels


def _concatenate(columns: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(column, dtype=np.float64) for column in columns] or [np.zeros(0)])


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return the SVG path through the points, interrupted at each None."""
    path, pen = "", "M"
    for point in points:
        path += f"{pen}{point[0]:.1f} {point[1]:.1f}" if point else ""
        pen = "L" if point else "M"
    return path


def chart_key(series: Sequence[Series]) -> Markup:
    """Return the legend: the colors of the series that have a label."""
    labeled = {s.label: s for s in series if s.label}
    keys = "".join(f'<span class="{s.color} {s.style}"><i></i>{escape(label)}</span>' for label, s in labeled.items())
    return Markup(f'<div class="key">{keys}</div>' if keys else "")


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with its name on the left and a note at its end."""

    name: str
    value: float
    note: str
    color: str


def bar_chart(bars: Sequence[Bar], *, title: str, low: float, high: float, scale: Scale = "linear") -> Markup:
    """Return a figure of horizontal bars that begin at `low`."""
    axis = _Axis(np.zeros(0), scale, low, high, widen=False)
    width, row_height, left, right = 960, 22, 230, 800
    return render(
        "bar_chart.html",
        title=title,
        width=width,
        height=row_height * len(bars) + 24,
        left=left,
        row_height=row_height,
        ticks=[(left + (right - left) * axis.fraction(at), label) for at, label in axis.ticks],
        bars=[
            (
                bar,
                float((right - left) * axis.fractions([bar.value])[0]) if not math.isnan(bar.value) else 0.0,
                shorten(bar.name, 28, end=12),
                row_height * i,
            )
            for i, bar in enumerate(bars)
        ],
    )


def plain(text: str) -> str:
    """Escape the dollar signs of a text for matplotlib: they begin a formula, and an invalid one is an error."""
    return text.replace("$", r"\$")


def save_png(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure atomically. Characters that its font lacks become boxes, without warnings."""
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(png, format="png", dpi=120)
    files.write_bytes(path, png.getvalue())
