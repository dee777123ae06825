"""Show how often each token of each document is seen and supervised: as text, as PNG, as a page.

Every axis begins at 0 and is the same for all documents, so that uniform coverage looks flat and documents can be
compared.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from niels_gpt.report.charts import Chart, Series, save_png, steps
from niels_gpt.report.document import (
    Block,
    Cell,
    Charts,
    Column,
    Document,
    Paragraph,
    Section,
    Table,
    count_cell,
    html_page,
)
from niels_gpt.report.numbers import percent, shorten
from niels_gpt.splice.coverage import Coverage
from niels_gpt.system.console import plural

_BLOCKS = " ▁▂▃▄▅▆▇█"
_MAX_PANELS = 24
_MAX_CHARTS = 100
_BINS = 200


def bin_means(values: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, means) of at most `bins` bins, whose sizes differ by at most one token."""
    number = min(bins, len(values))
    if not number:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    edges = np.arange(number + 1) * len(values) // number
    return edges[:-1], np.add.reduceat(values.astype(np.float64), edges[:-1]) / np.diff(edges)


def coverage_text(
    documents: Sequence[Coverage], *, title: str, examples: int, frames: int, width: int = 50
) -> list[str]:
    """Return one line per document: its tokens from left to right in `width` blocks, then statistics.

    A full block is the highest mean of any block; only tokens that were never seen are blank.
    """
    lines = [_summary(title, documents, examples, frames)]
    if not documents:
        return lines
    means = [bin_means(document.seen, width)[1] for document in documents]
    top = max((float(mean.max()) for mean in means if len(mean)), default=0.0)
    total = _total_seen(documents)
    names = [_printable(document.name) for document in documents]
    pad = max(map(_cells, names))
    numbers = [
        (f"{d.length:,}", *_low_mean_high(d.seen), *_low_mean_high(d.supervised), percent(int(d.seen.sum()) / total))
        for d in documents
    ]
    heads = ("tokens", "min", "mean", "max", "min", "mean", "max", "epoch")
    sizes = [max(map(len, column)) for column in zip(heads, *numbers, strict=True)]
    cells = [[f"{cell:>{size}}" for cell, size in zip(row, sizes, strict=True)] for row in (heads, *numbers)]
    over = f"  {'':{sizes[0]}}  {'seen':^{sum(sizes[1:4]) + 2}}  {'supervised':^{sum(sizes[4:7]) + 2}}"
    lines[0] += f"; █ = {_mean(top)} times"
    lines += [" " * (pad + 2 + width) + line.rstrip() for line in (over, _columns(cells[0]))]
    for name, mean, row in zip(names, means, cells[1:], strict=True):
        lines.append(f"{name}{' ' * (pad - _cells(name))}  {blocks(mean, top):<{width}}{_columns(row)}")
    return lines


def blocks(means: np.ndarray, top: float) -> str:
    """Return one block per value, in eighths of `top`, rounded up: only 0 is blank."""
    if top <= 0:
        return " " * len(means)
    return "".join(_BLOCKS[min(8, math.ceil(8 * float(mean) / top - 1e-9))] for mean in means)


def _columns(row: Sequence[str]) -> str:
    """Join the columns: tokens, seen, supervised, share."""
    return f"  {row[0]}  {' '.join(row[1:4])}  {' '.join(row[4:7])}  {row[7]}"


def coverage_png(documents: Sequence[Coverage], path: Path, *, title: str, examples: int, frames: int) -> None:
    """Write a PNG with one panel per document, at most 24, atomically."""
    shown = documents[:_MAX_PANELS]
    rest = f"\n{len(documents) - len(shown):,} more not drawn" if len(shown) < len(documents) else ""
    title = _summary(title, documents, examples, frames) + rest
    save_png(_charts(shown), path, title=title, panel=(3.4, 1.9))


def coverage_page(documents: Sequence[Coverage], *, title: str, examples: int, frames: int) -> str:
    """Return a self-contained page: a table of all documents, and a chart for each of the first hundred."""
    total, tokens = _total_seen(documents), max(sum(d.length for d in documents), 1)
    columns = [
        Column("Document", text=True),
        Column("Tokens"),
        *(Column(name, over="times seen") for name in ("min", "mean", "max")),
        *(Column(name, over="times supervised") for name in ("min", "mean", "max")),
        Column("never", over="times supervised", hint="tokens that are never a target"),
        Column("of the epoch", over="share", hint="tokens seen in this document among all tokens seen"),
        Column("of the text", over="share", hint="tokens of this document among the tokens of all"),
    ]
    rows = [
        [
            Cell(d.name),
            count_cell(d.length),
            *_cells_of(d.seen),
            *_cells_of(d.supervised),
            count_cell(int((d.supervised == 0).sum())),
            *(Cell(percent(share), share) for share in (int(d.seen.sum()) / total, d.length / tokens)),
        ]
        for d in documents
    ]
    blocks: list[Block] = [Table(columns, rows)] if rows else []
    sections = [Section("", blocks)]
    if rows:
        about = (
            f"Means over up to {_BINS} bins of each document. All charts begin at 0 and have the same scale, so that a "
            "document that is seen more often stands higher."
        )
        charts = Charts(_charts(documents[:_MAX_CHARTS]), key=True)
        sections.append(Section("Along the documents", [Paragraph(about), charts]))
    if len(documents) > _MAX_CHARTS:
        more = Paragraph(f"{len(documents) - _MAX_CHARTS:,} more: in the table only.", soft=True)
        sections.append(Section("", [more]))
    return html_page(Document(title, _summary("", documents, examples, frames), sections))


def _charts(documents: Sequence[Coverage]) -> list[Chart]:
    """Return a chart per document, with supervised and seen as steps."""
    high = _highest(documents)
    charts = []
    for document in documents:
        lines = []
        for name, values, color in (("supervised", document.supervised, "c1"), ("seen", document.seen, "c0")):
            starts, means = bin_means(values, _BINS)
            lines.append(Series(name, *steps([*starts, document.length], means), color=color, label=name))
        title = shorten(document.name, 44, end=16)
        size = (480, 180)
        charts.append(Chart(title, "times", lines, x_label="token", y_low=0, y_high=high, x_whole=True, size=size))
    return charts


def _summary(title: str, documents: Sequence[Coverage], examples: int, frames: int) -> str:
    tokens = sum(d.length for d in documents)
    inside = f"{plural(examples, 'example')} in {plural(frames, 'frame')}"
    text = f"{plural(len(documents), 'document')}, {plural(tokens, 'token')}; {inside}"
    return f"{title}: {text}" if title else text


def _total_seen(documents: Sequence[Coverage]) -> int:
    return max(sum(int(d.seen.sum()) for d in documents), 1)


def _highest(documents: Sequence[Coverage]) -> float:
    """Return the highest mean of all bins."""
    means = [bin_means(values, _BINS)[1] for d in documents for values in (d.seen, d.supervised)]
    return max((float(mean.max()) for mean in means if len(mean)), default=0.0)


def _low_mean_high(values: np.ndarray) -> tuple[str, str, str]:
    if not len(values):
        return "-", "-", "-"
    return f"{int(values.min()):,}", _mean(float(values.mean())), f"{int(values.max()):,}"


def _mean(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _cells_of(values: np.ndarray) -> list[Cell]:
    numbers = (values.min(), values.mean(), values.max()) if len(values) else (math.nan,) * 3
    return [Cell(text, float(number)) for text, number in zip(_low_mean_high(values), numbers, strict=True)]


def _printable(name: str, limit: int = 28) -> str:
    """Return a name for the terminal: one line, no control characters, at most `limit` cells."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(name.split()))
    while _cells(clean) > limit:
        clean = clean[:8] + "…" + clean[10:]
    return clean


def _cells(text: str) -> int:
    """Return the number of terminal cells of a text."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
