"""Self-contained HTML pages: templates, tables, text colored by a probability.

The templates are in `templates/`. Jinja2 escapes every value by `escape`, except `Markup`, which the functions here
return.
"""

from __future__ import annotations

import functools
import html as _html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from niels_gpt.report.numbers import one_in, percent
from niels_gpt.system.console import first_few

LEVELS = (1e-4, 0.01, 0.1, 0.5, 0.9)
"""Probabilities at which the color changes."""
COLORS = 8
"""Number of distinct line colors of a chart: classes c0, c1, ..."""

_SIGNS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n\r"} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD)


def visible(text: str) -> str:
    """Return a text with visible signs for control characters and surrogates; line ends and tabs stay."""
    return text.translate(_SIGNS)


def escape(text: str) -> Markup:
    """Return a text as HTML; line ends stay, control characters and surrogates become visible signs."""
    return Markup(_html.escape(visible(text)).replace("\r", "&#13;"))


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("niels_gpt.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
    )
    environment.globals.update(zip=zip, colors=COLORS, heat_spans=heat_spans, heat_bar=heat_bar)
    environment.filters.update(f1=lambda value: f"{value:.1f}", percent=percent, one_in=one_in, first_few=first_few)
    return environment


def render(template: str, **context: Any) -> Markup:
    """Return the HTML of a template."""
    return Markup(_templates().get_template(template).render(**context))


# Tables.


@dataclass(frozen=True)
class Column:
    """A column: its heading, whether it holds text, a heading over several columns, and a hint on hover."""

    name: str
    text: bool = False
    over: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """A table cell: text, the value to sort by, and small print below."""

    text: str
    value: float | None = None
    small: str = ""

    @property
    def sort_key(self) -> str:
        """The value as a number that JavaScript reads; -infinity if there is none."""
        return repr(float(self.value)) if self.value is not None and math.isfinite(self.value) else "-1e999"


def count_cell(count: int) -> Cell:
    """Return the cell of a count, with commas."""
    return Cell(f"{count:,}", count)


@dataclass(frozen=True)
class Group:
    """Rows below a heading ("" for none), with an optional row of totals."""

    rows: Sequence[Sequence[Cell]]
    heading: str = ""
    total: Sequence[Cell] | None = None


def table(columns: Sequence[Column], groups: Sequence[Group]) -> Markup:
    """Return a table; a click on the head of a column sorts the rows of each group by it."""
    for group in groups:
        for row in [*group.rows, group.total or columns]:
            if len(row) != len(columns):
                raise ValueError(f"a table row has {len(row)} cells for {len(columns)} columns")
    return render("table.html", columns=columns, groups=groups, spans=_spans(columns))


def _spans(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return (heading over several columns, how many), or nothing if no column has one."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.over:
            spans[-1] = column.over, spans[-1][1] + 1
        else:
            spans.append((column.over, 1))
    return spans if any(name for name, _ in spans) else []


# Text by probability.


def heat_levels(p: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Return 0 below the first of LEVELS, 1 from there, ..., 5 from the last on; 0 for an unknown probability."""
    values = np.nan_to_num(np.asarray(p, dtype=np.float64))
    return np.searchsorted(np.array(LEVELS), values, side="right")


def heat_spans(text: str, p: Sequence[float | None] | np.ndarray) -> Markup:
    """Return the text in spans of one color each; hovering shows the range of probabilities in the span.

    Raises ValueError unless there is one probability per character.
    """
    values = np.asarray(p, dtype=np.float64)
    if len(values) != len(text):
        raise ValueError(f"a strip has {len(text):,} characters but {len(values):,} probabilities: one each is needed")
    spans = []
    for start, end, level in level_runs(heat_levels(values)):
        known = values[start:end][~np.isnan(values[start:end])]
        low, high = (percent(float(value)) for value in (known.min(), known.max())) if len(known) else ("-", "-")
        hover = low if low == high else f"{low} to {high}"
        spans.append(f'<span class="h{level}" title="{_html.escape(hover)}">{escape(text[start:end])}</span>')
    return Markup("".join(spans))


def heat_bar(p: Sequence[float | None] | np.ndarray, *, bins: int = 240) -> Markup:
    """Return a document as one narrow strip: the highest level in each of at most `bins` bins."""
    levels = heat_levels(p)
    if not len(levels):
        return Markup("")
    edges = np.arange(min(bins, len(levels))) * len(levels) // min(bins, len(levels))
    rects = [
        f'<rect class="h{level}" x="{start}" y="0" width="{end - start}" height="1"/>'
        for start, end, level in level_runs(np.maximum.reduceat(levels, edges))
    ]
    svg = f'<svg class="strip" viewBox="0 0 {len(edges)} 1" preserveAspectRatio="none" aria-hidden="true">'
    return Markup(svg + "".join(rects) + "</svg>")


def heat_key() -> Markup:
    """Return the legend of the colors."""
    names = [f"below {percent(LEVELS[0])}", *(f"{percent(p)} or more" for p in LEVELS)]
    boxes = "".join(f'<span class="h{i}"><i class="box"></i>{name}</span>' for i, name in enumerate(names))
    return Markup(f'<div class="key levels">{boxes}</div>')


def level_runs(levels: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, end, level) of each stretch of equal levels."""
    if not len(levels):
        return []
    starts = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist()]
    return [(a, b, int(levels[a])) for a, b in zip(starts, [*starts[1:], len(levels)], strict=True)]
