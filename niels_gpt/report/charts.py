"""Charts as SVG, for pages that load nothing: lines or dots over linear and logarithmic axes, and bars; PNG files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from niels_gpt.report.html import escape, power, shortened
from niels_gpt.system import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["linear", "log", "exponent"]
"""How an axis is divided; with "exponent" the values are powers of ten already (log10), and labelled as such."""


@dataclass(frozen=True)
class Series:
    """A line of a chart. `name` shows on hover, `label` in the key ("" for none); `colour` is c0, c1, ... or ctl."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    colour: str = "c0"
    label: str = ""
    line: bool = True
    dots: bool = False
    style: str = ""
    """ "dash", "faint" or both."""


class _Axis:
    """From values to places: 0 at the low end, 1 at the high end, and ticks with labels between."""

    def __init__(self, values: np.ndarray, scale: Scale, low: float | None, high: float | None, *, widen: bool) -> None:
        self.scale = scale
        known = self.inner(values)
        known = known[np.isfinite(known)]
        ends = [float(self.inner(np.array([end]))[0]) for end in (low, high) if end is not None]
        known = np.concatenate([known, ends]) if len(known) or ends else np.array([0.0, 1.0])
        self.low, self.high = float(known.min()), float(known.max())
        if self.high - self.low < 1e-12 * max(abs(self.high), 1e-290):
            pad = 0.5 if scale != "linear" else max(abs(self.high) * 0.5, 1e-9)
            self.low, self.high = self.low - pad * (low is None), self.high + pad
        span = self.high - self.low
        whole = scale != "linear"
        step = max(1.0, _nice(span / 6, (1, 2, 3, 5, 10))) if whole else _nice(span / 4)
        if widen:
            self.low, self.high = math.floor(self.low / step + 1e-9) * step, math.ceil(self.high / step - 1e-9) * step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        self.ticks = [(i * step, self.label(i * step, step)) for i in range(first, last + 1)]
        if scale == "log" and span < 1.6:  # decades alone would leave one label or none
            fine = [(10.0**e * m) for e in range(math.floor(self.low), math.ceil(self.high) + 1) for m in (1, 2, 5)]
            self.ticks = [
                (math.log10(v), f"{v:,.12g}") for v in fine if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9
            ]

    def inner(self, values: np.ndarray) -> np.ndarray:
        if self.scale != "log":
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values)

    def label(self, at: float, step: float) -> str:
        if self.scale == "linear":
            digits = len(f"{step:.12f}".rstrip("0").partition(".")[2])
            return f"{at + 0.0:,.{digits}f}"
        return f"{10**at:,.12g}" if -3 <= at <= 3 else power(at)

    def place(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        inner = self.inner(np.asarray(values, dtype=np.float64))
        return (np.clip(inner, self.low, self.high) - self.low) / (self.high - self.low)


def _nice(step: float, digits: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """The first of the digits times a power of ten at or above a step."""
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
    key: bool = True,
    size: tuple[int, int] = (480, 270),
) -> str:
    """A figure with lines or dots over common axes and a key; what is not finite is left out."""
    width, height = size
    x_axis = _Axis(_joined([s.x for s in series]), x_scale, None, None, widen=False)
    if x_ticks:
        x_axis.ticks = [(float(x_axis.inner(np.array([at]))[0]), label) for at, label in x_ticks]
    y_axis = _Axis(_joined([s.y for s in series]), y_scale, y_low, y_high, widen=True)
    left, right, top, bottom = 12 + 7 * max(len(label) for _, label in y_axis.ticks), width - 14, 24, height - 38
    across, down = right - left, bottom - top
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(f"{title}: {y_label} by {x_label}")}">'
    ]
    for at, label in y_axis.ticks:
        y = bottom - down * (at - y_axis.low) / (y_axis.high - y_axis.low)
        parts.append(f'<path class="frame" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    edge = -1.0
    for at, label in x_axis.ticks:
        x = left + across * (at - x_axis.low) / (x_axis.high - x_axis.low)
        parts.append(f'<path class="frame" d="M{x:.1f} {bottom}v4"/>')
        half = 3.6 * len(label)
        if x - half > edge and x - half >= 0:
            edge = x + half + 8
            anchor, x = ("end", float(width - 2)) if x + half > width - 2 else ("middle", x)
            parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{escape(label)}</text>')
    parts.append(f'<text class="ink" x="2" y="13">{escape(y_label)}</text>')
    parts.append(f'<text class="ink" x="{right}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>')
    for line in series:
        xs, ys = left + across * x_axis.place(line.x), bottom - down * y_axis.place(line.y)
        parts.append(
            f'<g class="{line.colour} {line.style}"><title>{escape(line.name)}</title>{_drawn(line, xs, ys)}</g>'
        )
    return _figure(title, [*parts, "</svg>", chart_key(series) if key else ""])


def _joined(columns: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(column, dtype=np.float64) for column in columns] or [np.zeros(0)])


def _drawn(line: Series, xs: np.ndarray, ys: np.ndarray) -> str:
    points = [(x, y) if math.isfinite(x + y) else None for x, y in zip(xs, ys, strict=True)]
    path, pen = "", "M"
    for point in points:
        path += f"{pen}{point[0]:.1f} {point[1]:.1f}" if point else ""
        pen = "L" if point else "M"
    html = f'<path class="curve" d="{path}"/>' if line.line and path else ""
    if line.dots:
        html += "".join(f'<circle class="dot" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="2.6"/>' for p in points if p)
    return html


def chart_key(series: Sequence[Series]) -> str:
    """Which colour is which, for those that have a label."""
    named = {s.label: s for s in series if s.label}
    keys = "".join(f'<span class="{s.colour} {s.style}"><i></i>{escape(label)}</span>' for label, s in named.items())
    return f'<div class="key">{keys}</div>' if keys else ""


def _figure(title: str, html: Sequence[str]) -> str:
    caption = f"<figcaption><b>{escape(title)}</b></figcaption>" if title else ""
    return "\n".join(["<figure>", caption, *html, "</figure>"])


def bars(
    rows: Sequence[tuple[str, float, str, str]], *, title: str, low: float, high: float, scale: Scale = "linear"
) -> str:
    """Horizontal bars from the left edge: (name, value, what is written at its end, colour) per row."""
    axis = _Axis(np.zeros(0), scale, low, high, widen=False)
    width, step, left, right = 960, 22, 230, 800
    height = step * len(rows) + 24
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for at, label in axis.ticks:
        x = left + (right - left) * (at - axis.low) / (axis.high - axis.low)
        parts.append(f'<path class="frame" d="M{x:.1f} 0V{height - 20}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{escape(label)}</text>')
    for i, (name, value, note, colour) in enumerate(rows):
        length = float((right - left) * axis.place([value])[0]) if not math.isnan(value) else 0.0
        shown = shortened(name, 28, end=12)
        parts.append(f'<g class="{colour}"><title>{escape(name)}</title>')
        parts.append(f'<text class="ink" x="{left - 8}" y="{step * i + 15}" text-anchor="end">{escape(shown)}</text>')
        parts.append(
            f'<rect class="own" x="{left}" y="{step * i + 3}" width="{max(length, 1):.1f}" height="{step - 7}"/>'
        )
        parts.append(f'<text class="ink" x="{left + length + 6:.1f}" y="{step * i + 15}">{escape(note)}</text></g>')
    return _figure(title, [*parts, "</svg>"])


def save_png(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure, whole or not at all; letters that its font lacks are boxes, without a word each."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(picture, format="png", dpi=120)
    files.write_bytes(path, picture.getvalue())
