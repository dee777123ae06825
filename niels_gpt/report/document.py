"""A report as sections of paragraphs, tables, charts and texts, written as an HTML page or as Markdown."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from niels_gpt.report.charts import Series, line_chart
from niels_gpt.report.html import Cell, Column, Group, render, table, visible
from niels_gpt.report.numbers import short

CHART_ROWS = 9
"""Rows of the table that stands for a chart in Markdown."""
_MARKUP = re.compile(r"([\\`*\[\]<|])")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `soft` is small print."""

    text: str
    soft: bool = False
    kind: str = field(default="paragraph", init=False)


@dataclass(frozen=True)
class Lead:
    """The result in a few sentences, set apart."""

    lines: Sequence[str]
    kind: str = field(default="lead", init=False)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, str]]
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True)
class Table:
    """A table; in HTML a click on a heading sorts it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    kind: str = field(default="table", init=False)


@dataclass(frozen=True)
class Chart:
    """Lines over common axes; `options` are those of `line_chart`. In Markdown, a table of points."""

    title: str
    y_label: str
    series: Sequence[Series]
    x_label: str = "steps"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Charts:
    """Charts beside each other where the page is wide enough."""

    charts: Sequence[Chart]
    kind: str = field(default="charts", init=False)


@dataclass(frozen=True)
class Text:
    """Text as it is: a command, a config, what a model wrote."""

    text: str
    kind: str = field(default="text", init=False)


@dataclass(frozen=True)
class Details:
    """Blocks that are folded in HTML."""

    summary: str
    blocks: Sequence[Block]
    open: bool = False
    kind: str = field(default="details", init=False)


Block = Paragraph | Lead | Facts | Table | Charts | Text | Details


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    heading: str
    blocks: Sequence[Block]
    level: int = 2


@dataclass(frozen=True)
class Document:
    """A report."""

    title: str
    subtitle: str
    sections: Sequence[Section]


# HTML.


def html_page(document: Document) -> str:
    """Return a document as a self-contained page."""
    context = {"chart_svg": _chart_svg, "as_table": lambda block: table(block.columns, [Group(block.rows)])}
    return str(render("document.html", title=document.title, document=document, **context))


def _chart_svg(chart: Chart) -> Markup:
    spoken = "; ".join(filter(None, (_spoken(series) for series in chart.series)))
    options: dict[str, Any] = {"x_whole": True, "description": spoken, **chart.options}
    return line_chart(chart.series, x_label=chart.x_label, y_label=chart.y_label, title=chart.title, **options)


def _spoken(series: Series) -> str:
    """Return a labeled line in words, for those who do not see it."""
    points = _points(series)
    if not series.label or not points:
        return ""
    return f"{series.label} from {short(points[0][1])} to {short(points[-1][1])}"


def _points(series: Series) -> list[tuple[float, float]]:
    pairs = zip(map(float, series.x), map(float, series.y), strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(x + y)]


# Markdown.


def markdown(document: Document) -> str:
    """Return a document as Markdown (CommonMark with tables). Text of others is escaped; folded blocks are open."""
    lines = [f"# {_escape(document.title)}", "", _escape(document.subtitle), ""]
    for section in document.sections:
        lines += [f"{'#' * section.level} {_escape(section.heading)}", ""]
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
    else:
        yield from (f"{'#' * (level + 1)} {_escape(block.summary)}", "")
        for inner in block.blocks:
            yield from _markdown_block(inner, level + 1)


def _markdown_chart(chart: Chart) -> Iterator[str]:
    """Yield a table with a few of the points of a chart, evenly spread over the line that reaches furthest."""
    labeled = [(series.label, _points(series)) for series in chart.series if series.label]
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
