"""Charts: axes, ticks, lines, dots and bars, laid out once, for SVG (see `document.html_page`) and for PNG files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from niels_gpt.report.numbers import power, short, shorten
from niels_gpt.system import files

PALETTE = {
    "c0": "#2c63b8",
    "c1": "#c4511a",
    "c2": "#1d7f5f",
    "c3": "#a8327d",
    "c4": "#8a6a00",
    "c5": "#1987a8",
    "c6": "#6b4fc0",
    "c7": "#8c3b32",
    "ctl": "#7b848f",
}
"""Colors of lines and bars in a PNG and in the light theme of a page."""
COLORS = 8
"""Number of distinct line colors of a chart: classes c0, c1, ..."""

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
    """ "dash", "faint", "fill" (the area below the line), or several of them."""

    def points(self) -> list[tuple[float, float]]:
        """Return the points that are finite."""
        pairs = zip(map(float, self.x), map(float, self.y), strict=True)
        return [(x, y) for x, y in pairs if math.isfinite(x + y)]


@dataclass(frozen=True)
class Chart:
    """Lines or dots over common axes, and a legend; points that are not finite are skipped."""

    title: str
    y_label: str
    series: Sequence[Series]
    x_label: str = "steps"
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    y_low: float | None = None
    y_high: float | None = None
    """The axis reaches at least from `y_low` to `y_high`."""
    y_most: float = math.inf
    """Points above are not drawn."""
    x_ticks: Sequence[tuple[float, str]] = ()
    x_whole: bool = False
    """Label whole numbers only: x counts tokens or steps."""
    key: bool = True
    size: tuple[int, int] = (480, 270)


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with its name on the left and a note at its end."""

    name: str
    value: float
    note: str
    color: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars that begin at `low`."""

    title: str
    bars: Sequence[Bar]
    low: float
    high: float
    scale: Scale = "linear"


def steps(edges: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of a line that has each of the values from one edge to the next."""
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)


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

    def values(self, transformed: Sequence[float]) -> list[float]:
        """Return the values of transformed ones."""
        return [10.0**at if self.scale == "log" else at for at in transformed]

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


def _frame(chart: Chart) -> dict[str, Any]:
    """Return the axes of a chart with their ticks, and the lines as they are drawn."""
    width, height = chart.size
    hidden = [np.where(np.asarray(s.y, dtype=np.float64) <= chart.y_most, s.y, math.nan) for s in chart.series]
    series = [replace(s, y=y) for s, y in zip(chart.series, hidden, strict=True)]
    x_axis = _Axis(_concatenate([s.x for s in series]), chart.x_scale, None, None, widen=False, whole=chart.x_whole)
    if chart.x_ticks:
        x_axis.ticks = [(float(x_axis.transform(np.array([at]))[0]), label) for at, label in chart.x_ticks]
    y_axis = _Axis(_concatenate([s.y for s in series]), chart.y_scale, chart.y_low, chart.y_high, widen=True)
    series = _dashed_where_covering(series, x_axis, y_axis, 2 / (height - 62))
    left, right, top, bottom = 12 + 7 * max(len(label) for _, label in y_axis.ticks), width - 14, 24, height - 38
    across, down = right - left, bottom - top
    x_ticks = [(left + across * x_axis.fraction(at), label) for at, label in x_axis.ticks]
    return {
        "series": series,
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
        "x_axis": x_axis,
        "y_axis": y_axis,
        "y_ticks": [(bottom - down * y_axis.fraction(at), label) for at, label in y_axis.ticks],
        "x_marks": [x for x, _ in x_ticks],
        "x_labels": _spaced_labels(x_ticks, width),
    }


def line_layout(chart: Chart) -> dict[str, Any]:
    """Return what to draw of a chart: its axes with ticks, and each line with its path and its dots."""
    at = _frame(chart)
    lines = []
    for line in at["series"]:
        xs = at["left"] + (at["right"] - at["left"]) * at["x_axis"].fractions(line.x)
        ys = at["bottom"] - (at["bottom"] - at["top"]) * at["y_axis"].fractions(line.y)
        points = [(x, y) if math.isfinite(x + y) else None for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
        dots = [point for point in points if point] if line.dots else []
        lines.append((line, _path(points) if line.line else "", dots))
    return {**at, "lines": lines, "spoken": "" if chart.y_scale == "exponent" else _spoken(chart.series)}


def _spoken(series: Sequence[Series]) -> str:
    """Return the lines with a label of their own in words, for those who do not see them."""
    labels = [line.label for line in series if line.line]
    ends = {line.label: line.points() for line in series if line.line and labels.count(line.label) == 1}
    return "; ".join(
        f"{label} from {short(points[0][1])} to {short(points[-1][1])}"
        for label, points in ends.items()
        if label and points
    )


def labeled(series: Sequence[Series]) -> list[Series]:
    """Return the lines of a legend: one for each label."""
    return list({s.label: s for s in series if s.label}.values())


def _dashed_where_covering(series: Sequence[Series], x_axis: _Axis, y_axis: _Axis, near: float) -> list[Series]:
    """Return the series, dashed if they run over an earlier labeled one along most of their points.

    near: the difference, as a fraction of the axis, that cannot be seen.
    """
    drawn: list[tuple[np.ndarray, np.ndarray]] = []
    result = []
    for line in series:
        xs, ys = x_axis.fractions(line.x), y_axis.fractions(line.y)
        if line.line and line.label and len(xs) and (np.diff(xs) > 0).all():
            below = [np.interp(xs, *earlier, left=math.nan, right=math.nan) for earlier in drawn]
            if any(np.mean(np.abs(values - ys) < near) > 0.5 for values in below):
                line = replace(line, style=f"{line.style} dash".strip())
            else:
                drawn.append((xs, ys))
        result.append(line)
    return result


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


def bar_layout(chart: BarChart) -> dict[str, Any]:
    """Return the ticks of a bar chart, and each bar with its length and the name beside it."""
    axis = _Axis(np.zeros(0), chart.scale, chart.low, chart.high, widen=False)
    left, right = 230, 800
    lengths = (right - left) * np.nan_to_num(axis.fractions([bar.value for bar in chart.bars]))
    names = [shorten(bar.name, 28, end=12) for bar in chart.bars]
    ticks = [(left + (right - left) * axis.fraction(at), label) for at, label in axis.ticks]
    return {"left": left, "ticks": ticks, "bars": list(zip(chart.bars, lengths.tolist(), names, strict=True))}


def save_png(charts: Sequence[Chart], path: Path, *, title: str = "", panel: tuple[float, float] = (8, 3.3)) -> None:
    """Write charts, each on a panel of so many inches, in up to 3 or 4 columns, as a PNG, atomically.

    Characters that the font lacks become boxes, without warnings.
    """
    from matplotlib.figure import Figure

    across = min(max(len(charts), 1), 3 if len(charts) <= 9 else 4)
    down = max(1, -(-len(charts) // across))
    figure = Figure(figsize=(max(8, across * panel[0]), 1.2 + down * panel[1]), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    labels: dict[str, Any] = {}
    for axes, chart in zip(grid, charts, strict=False):
        frame = _frame(chart)
        for line in frame["series"]:
            dash = ("--" if "dash" in line.style else "-") if line.line else "none"
            look: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.55} if "faint" in line.style else {"linewidth": 1.5}
            look |= {"color": PALETTE[line.color], "label": _plain(line.label), "linestyle": dash}
            [drawn] = axes.plot(line.x, line.y, marker="o" if line.dots else "", markersize=3.5, clip_on=False, **look)
            if "fill" in line.style:
                axes.fill_between(line.x, line.y, color=PALETTE[line.color])
            if line.label:
                labels.setdefault(drawn.get_label(), drawn)
        shown = {label for *_, label in frame["x_labels"]}
        for name in ("x", "y"):
            axis = frame[f"{name}_axis"]
            at, limits = axis.values([t for t, _ in axis.ticks]), axis.values([axis.low, axis.high])
            axes.set(**{f"{name}scale": "log" if axis.scale == "log" else "linear"})
            all_shown = name == "y" or chart.x_ticks
            names = [label if all_shown or label in shown else "" for _, label in axis.ticks]
            axes.set(**{f"{name}ticks": at, f"{name}ticklabels": names, f"{name}lim": limits})
        axes.minorticks_off()
        axes.tick_params(labelsize="small")
        axes.tick_params("x", rotation=45 if chart.x_ticks else 0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(_plain(chart.title), fontsize="medium")
        axes.set_xlabel(_plain(chart.x_label))
        axes.set_ylabel(_plain(chart.y_label))
    for axes in grid[len(charts) :]:
        axes.set_visible(False)
    if labels:
        figure.legend(handles=labels.values(), loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.suptitle(_plain(title), fontsize="medium")
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(png, format="png", dpi=120)
    files.write_bytes(path, png.getvalue())


def _plain(text: str) -> str:
    """Escape the dollar signs of a text for matplotlib: they begin a formula, and an invalid one is an error."""
    return text.replace("$", r"\$")
