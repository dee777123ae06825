"""A report as sections of paragraphs, tables, charts and texts, written as an HTML page or as Markdown.

The HTML is in `templates/`. Jinja2 escapes every value by `escape`.
"""

from __future__ import annotations

import bisect
import functools
import html as _html
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from niels_gpt.report.charts import COLORS, PALETTE, BarChart, Chart, bar_layout, labeled, line_layout
from niels_gpt.report.numbers import percent, short

CHART_ROWS = 9
"""Rows of the table that stands for a chart in Markdown."""
LEVELS = (1e-4, 0.01, 0.1, 0.5, 0.9)
"""Probabilities at which the color of a text changes."""
BAR_BINS = 240
"""Most levels of the bar that shows a whole text."""

_SIGNS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n\r"} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD)
_MARKUP = re.compile(r"([\\`*\[\]<|])")

Inline = str | Sequence[tuple[str, str]]
"""A text, or pieces of one with their style: "" for plain text, "b" for bold, "soft" for small print."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `soft` is small print."""

    text: str
    soft: bool = False


@dataclass(frozen=True)
class Lead:
    """The result in a few sentences, set apart."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list."""

    lines: Sequence[Inline]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Prose:
    """Running text of a template, with its values. HTML only."""

    template: str
    values: Mapping[str, Any]


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


@dataclass(frozen=True)
class Table:
    """A table of rows, or of groups of rows; in HTML a click on a heading sorts the rows of each group by it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = ()
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        for group in self.groups or [Group(self.rows)]:
            for row in [*group.rows, group.total or self.columns]:
                if len(row) != len(self.columns):
                    raise ValueError(f"a table row has {len(row)} cells for {len(self.columns)} columns")

    def spans(self) -> list[tuple[str, int]]:
        """Return (heading over several columns, how many), or nothing if no column has one."""
        spans = [(over, len(list(columns))) for over, columns in itertools.groupby(c.over for c in self.columns)]
        return spans if any(name for name, _ in spans) else []


@dataclass(frozen=True)
class Charts:
    """Charts beside each other where the page is wide enough; `key`: below the legend of the first, for all."""

    charts: Sequence[Chart]
    key: bool = False


@dataclass(frozen=True)
class Text:
    """Text as it is: a command, a config, what a model wrote."""

    text: str


@dataclass(frozen=True)
class HeatText:
    """Text with the color of a probability for each character, after a grey prompt. HTML only."""

    text: str
    p: Sequence[float | None]
    prompt: str = ""


@dataclass(frozen=True)
class HeatKey:
    """The legend of the colors of `HeatText`. HTML only."""

    names: Sequence[str] = (f"below {percent(LEVELS[0])}", *(f"{percent(p)} or more" for p in LEVELS))


@dataclass(frozen=True)
class Passage:
    """A passage of a text below a line on it. HTML only."""

    heading: Inline
    text: HeatText


@dataclass(frozen=True)
class Details:
    """Blocks that are folded in HTML, with the highest levels of the probabilities of `bar` in view."""

    summary: Inline
    blocks: Sequence[Block]
    open: bool = False
    bar: Sequence[float | None] = ()


Block = (
    Paragraph
    | Lead
    | Items
    | Facts
    | Prose
    | Table
    | Chart
    | BarChart
    | Charts
    | Text
    | HeatText
    | HeatKey
    | Passage
    | Details
)


@dataclass(frozen=True)
class Section:
    """A heading ("" for none) and what is below it."""

    heading: str
    blocks: Sequence[Block]
    level: int = 2


@dataclass(frozen=True)
class Document:
    """A report."""

    title: str
    subtitle: str
    sections: Sequence[Section]


# Text by probability.


def heat_levels(p: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Return 0 below the first of LEVELS, 1 from there, ..., 5 from the last on; 0 for an unknown probability."""
    values = np.nan_to_num(np.asarray(p, dtype=np.float64))
    return np.searchsorted(np.array(LEVELS), values, side="right")


def heat_spans(text: str, p: Sequence[float | None] | np.ndarray) -> Iterator[tuple[str, int, float, float]]:
    """Yield (text, level, lowest and highest probability) of each stretch of one level; nan if all are unknown.

    Raises ValueError unless there is one probability per character.
    """
    values = np.asarray(p, dtype=np.float64)
    if len(values) != len(text):
        raise ValueError(f"a strip has {len(text):,} characters but {len(values):,} probabilities: one each is needed")
    for start, end, level in level_runs(heat_levels(values)):
        known = values[start:end][~np.isnan(values[start:end])]
        low, high = (float(known.min()), float(known.max())) if len(known) else (math.nan, math.nan)
        yield text[start:end], level, low, high


def heat_bar(p: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Return the highest level in each of at most BAR_BINS parts of a text."""
    levels = heat_levels(p)
    bins = min(BAR_BINS, len(levels))
    return np.maximum.reduceat(levels, np.arange(bins) * len(levels) // bins) if bins else levels


def level_runs(levels: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, end, level) of each stretch of equal levels."""
    if not len(levels):
        return []
    starts = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist()]
    return [(a, b, int(levels[a])) for a, b in zip(starts, [*starts[1:], len(levels)], strict=True)]


# HTML.


def visible(text: str) -> str:
    """Return a text with visible signs for control characters and surrogates; line ends and tabs stay."""
    return text.translate(_SIGNS)


def escape(text: str) -> Markup:
    """Return a text as HTML; line ends stay, control characters and surrogates become visible signs."""
    return Markup(_html.escape(visible(text)).replace("\r", "&#13;"))


def heat_html(text: str, p: Sequence[float | None]) -> Markup:
    """Return the text in spans of one color each; hovering shows the range of probabilities in the span."""
    spans = []
    for piece, level, low, high in heat_spans(text, p):
        least, most = percent(low), percent(high)
        hover = least if least == most else f"{least} to {most}"
        spans.append(f'<span class="h{level}" title="{_html.escape(hover)}">{escape(piece)}</span>')
    return Markup("".join(spans))


@functools.cache
def _macros() -> Any:
    environment = Environment(
        loader=PackageLoader("niels_gpt.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
    )
    for function in (line_layout, bar_layout, labeled, heat_html, heat_bar, level_runs):
        environment.filters[function.__name__] = function
    environment.filters.update(f1=lambda value: f"{value:.1f}", kind=lambda block: type(block).__name__)
    environment.globals.update(zip=zip, colors=COLORS, palette=PALETTE, group=Group)
    return environment.get_template("document.html").module


def html_page(document: Document) -> str:
    """Return a document as a self-contained page."""
    return str(_macros().page(document))


def html_block(block: Block) -> str:
    """Return a block as HTML."""
    return str(_macros().show(block))


# Markdown.


def markdown(document: Document) -> str:
    """Return a document as Markdown (CommonMark with tables). Text of others is escaped; folded blocks are open."""
    lines = [f"# {_escape(document.title)}", "", _escape(document.subtitle), ""]
    for section in document.sections:
        lines += [f"{'#' * section.level} {_escape(section.heading)}", ""] if section.heading else []
        for block in section.blocks:
            lines += _markdown_block(block, section.level)
    return "\n".join(lines).rstrip() + "\n"


def _markdown_block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield from (_escape(block.text), "")
    elif isinstance(block, Lead):
        for line in block.lines:
            yield from (f"> {_escape(line)}", ">")
        yield ""
    elif isinstance(block, Facts):
        yield from (*(f"- {_escape(name)}: {_escape(value)}" for name, value in block.rows), "")
    elif isinstance(block, Items):
        yield from (*(f"- {_escape(_unstyled(line))}" for line in block.lines), "")
    elif isinstance(block, Table):
        rows = [[" ".join(filter(None, (cell.text, cell.small))) for cell in row] for row in block.rows]
        yield from _markdown_table([(c.over + " " + c.name).strip() for c in block.columns], rows, block.columns)
    elif isinstance(block, Charts):
        for chart in block.charts:
            unit = f" ({_escape(chart.y_label)})" if chart.y_label else ""
            yield from (f"{_escape(chart.title)}{unit}:", "")
            yield from _markdown_chart(chart)
    elif isinstance(block, Text):
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", block.text)), 3)
        yield from (fence + "text", visible(block.text), fence, "")
    elif isinstance(block, Details):
        yield from (f"{'#' * (level + 1)} {_escape(_unstyled(block.summary))}", "")
        for inner in block.blocks:
            yield from _markdown_block(inner, level + 1)
    else:
        raise TypeError(f"a {type(block).__name__} has no Markdown")


def _unstyled(text: Inline) -> str:
    return text if isinstance(text, str) else "".join(piece for _, piece in text)


def _markdown_chart(chart: Chart) -> Iterator[str]:
    """Yield a table with a few of the points of a chart, evenly spread over the line that reaches furthest."""
    labeled = [(series.label, series.points()) for series in chart.series if series.label]
    labeled = [(label, points) for label, points in labeled if points]
    reach = max((points[-1][0] for _, points in labeled), default=0)
    longest = min((points for _, points in labeled if points[-1][0] == reach), key=len, default=[])
    number = min(CHART_ROWS, len(longest))
    at = [longest[i * (len(longest) - 1) // max(number - 1, 1)][0] for i in range(number)]
    rows = []
    for previous, x in zip([-math.inf, *at], at, strict=False):
        rows.append([f"{x:,g}", *(_value_at(points, previous, x) for _, points in labeled)])
    yield from _markdown_table([chart.x_label, *(label for label, _ in labeled)], rows, [])


def _value_at(points: Sequence[tuple[float, float]], previous: float, x: float) -> str:
    """Return the last value at or before x, if the line reaches past `previous`."""
    index = bisect.bisect_right(points, (x, math.inf)) - 1
    return short(points[index][1]) if index >= 0 and points[-1][0] > previous else ""


def _markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> Iterator[str]:
    kinds = [":---" if column.text else "---:" for column in columns] or ["---:"] * len(names)
    yield f"| {' | '.join(map(_escape, names))} |"
    yield f"| {' | '.join(kinds)} |"
    for row in rows:
        yield f"| {' | '.join(map(_escape, row))} |"
    yield ""


def _escape(text: str) -> str:
    """Return a text on one line, without Markdown or HTML in it."""
    return _MARKUP.sub(r"\\\1", visible(" ".join(text.split())))
