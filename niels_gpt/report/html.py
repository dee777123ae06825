"""HTML pages that need nothing but themselves: style, numbers, tables, text coloured by a probability.

Every function returns a piece of HTML. What comes from outside (names, texts) is escaped here, by the function that
takes it; parameters called `html` are taken as they are.
"""

from __future__ import annotations

import html as _html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = (1e-4, 0.01, 0.1, 0.5, 0.9)
"""Where the colour of a probability changes."""

COLOURS = 8
"""How many lines of a chart can be told apart by colour: classes c0, c1, ..."""

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--soft:#5b6470;--line:#d9dde2;--box:#f5f6f8;--mark:#2c63b8;
--c0:#2c63b8;--c1:#c4511a;--c2:#1d7f5f;--c3:#a8327d;--c4:#8a6a00;--c5:#1987a8;--c6:#6b4fc0;--c7:#8c3b32;--ctl:#7b848f;
--h0:#ffffff;--h1:#fff5cc;--h2:#ffe08f;--h3:#ffbd6b;--h4:#fb9263;--h5:#f0716d;--ht:#14171a}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e4e7eb;--soft:#a0a9b4;--line:#343b44;--box:#1e2329;
--mark:#7fb0ff;--c0:#7fb0ff;--c1:#ff9a62;--c2:#5fd0a5;--c3:#f08cc8;--c4:#e3c04a;--c5:#62cbe8;--c6:#b39dff;--c7:#f0938a;
--ctl:#98a2ae;--h0:#15181c;--h1:#2e2a1c;--h2:#4d3c12;--h3:#6f430e;--h4:#933615;--h5:#b3242f;--ht:#f6f7f8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1.25rem 4rem;max-width:1000px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0 .3rem}h2{font-size:1.2rem;margin:2.4rem 0 .5rem}
h3{font-size:1rem;margin:1.4rem 0 .3rem}p{margin:.5rem 0;max-width:50rem}.soft,figcaption{color:var(--soft)}
.lead{font-size:1.12rem;background:var(--box);border-left:4px solid var(--mark);padding:.7rem 1rem;margin:1rem 0}
.lead p{max-width:none}dt{font-weight:600;margin-top:.6rem}dd{margin:0 0 0 1.2rem;max-width:50rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.25rem .5rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:normal}
th{font-weight:600;vertical-align:bottom}td.t,th.t{text-align:left;overflow-wrap:anywhere}td.n{white-space:nowrap}
td.t{min-width:8rem}thead tr.over th{text-align:center;border-bottom:0;color:var(--soft)}
tr.group td{text-align:left;font-weight:600;background:var(--box);padding-top:.5rem}
tr.total td{font-weight:600}th button{all:unset;cursor:pointer;text-decoration:underline dotted var(--soft)}
th button:focus-visible{outline:2px solid var(--mark)}th button:hover{color:var(--mark)}
th[aria-sort] button{color:var(--mark)}th[aria-sort=ascending] button::after{content:"\\00a0↑"}
th[aria-sort=descending] button::after{content:"\\00a0↓"}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr));gap:1rem 1.5rem}
figure{margin:.8rem 0;min-width:0}figcaption{font-size:.9rem;margin-bottom:.2rem}
svg{display:block;width:100%;height:auto}figcaption b{color:var(--fg)}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .ink{fill:var(--fg)}
.frame{stroke:var(--line);stroke-width:1;fill:none}.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}
.dot{stroke:none}.faint .curve{stroke-width:1;opacity:.55}.dash .curve{stroke-dasharray:5 4}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.84rem;color:var(--soft)}
.key span{display:inline-flex;align-items:center;gap:.35rem}.key i{width:1.1rem;border-top:3px solid var(--k)}
.key .dash i{border-top-style:dashed}.key i.box{height:.9rem;border:1px solid var(--line);background:var(--k)}
details{border:1px solid var(--line);border-radius:6px;margin:.6rem 0;background:var(--bg)}
summary{cursor:pointer;padding:.45rem .7rem;background:var(--box);border-radius:6px}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.65 ui-monospace,"SF Mono",Menlo,Consolas,monospace;
padding:.6rem .75rem;max-height:34rem;overflow-y:auto;tab-size:4}
.text span{color:var(--ht)}.text .prompt{color:var(--soft)}
.strip{height:14px;shape-rendering:crispEdges;margin-top:.3rem;border:1px solid var(--line)}
.passage{border-left:3px solid var(--line);margin:1rem 0}
.passage header{padding:0 .75rem}.passage .text{padding:.3rem .75rem;max-height:26rem}
@media print{body{max-width:none}details,.text{max-height:none}}
"""
_PALETTE = (
    "".join(f".c{i}{{--k:var(--c{i})}}" for i in range(COLOURS))
    + ".ctl{--k:var(--ctl)}.curve,.frame.own{stroke:var(--k)}.dot,rect.own{fill:var(--k)}"
    + "".join(
        f".h{i}{{background:var(--h{i})}}svg .h{i},.key .h{i}{{fill:var(--h{i});background:none;--k:var(--h{i})}}"
        for i in range(6)
    )
)
_SORT = """
for (const button of document.querySelectorAll("thead button")) button.onclick = () => {
  const head = button.parentNode, row = head.parentNode, table = head.closest("table");
  const column = [...row.children].indexOf(head), text = head.classList.contains("t");
  const up = head.ariaSort ? head.ariaSort === "descending" : text;
  for (const other of row.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = line => text ? line.children[column].textContent : Number(line.children[column].dataset.v);
  const order = (a, b) => text ? value(a).localeCompare(value(b)) : value(a) - value(b) || 0;
  for (const body of table.tBodies) {
    const lines = [...body.rows].filter(line => !line.className);
    body.append(...lines.sort((a, b) => up ? order(a, b) : order(b, a)));
    body.append(...[...body.rows].filter(line => line.className === "total"));
  }
};
"""


def escape(text: str) -> str:
    """Any text as HTML: markup shows as written, line ends stay, what no page may hold becomes a visible sign."""
    clean = "".join(
        _SIGNS.get(c, c) if c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" else c for c in text
    )
    return _html.escape(clean).replace("\r", "&#13;")


_SIGNS = {chr(i): chr(0x2400 + i) for i in range(32) if chr(i) not in "\t\n\r"}
_SIGNS |= {chr(i): "\N{REPLACEMENT CHARACTER}" for i in (*range(0x80, 0xA0), *range(0xD800, 0xE000))} | {"\x7f": "␡"}


def page(title: str, html: Iterable[str]) -> str:
    """A whole page. It is told to load nothing, and it says so to the browser."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}{_PALETTE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(html)
        + f"\n</main>\n<script>{_SORT}</script>\n</body>\n</html>\n"
    )


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


# Numbers as people read them.


def power(exponent: float) -> str:
    """10⁻¹²: a power of ten, the exponent rounded."""
    return "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def short(value: float) -> str:
    """Three digits: 0.0123, 4.5·10⁻⁹; what is below 1 is not rounded up to it."""
    if not math.isfinite(value):
        return "-"
    if 0 < 1 - value < 0.0005:
        return "> 0.999"
    if value and abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}·{power(int(exponent))}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def shortened(text: str, limit: int, *, end: int = 0) -> str:
    """A text on one line of at most `limit` characters; what is left out comes before the last `end` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1 - end] + "…" + line[len(line) - end :]


def percent(share: float) -> str:
    """97.3%, 0.012%, 4.5·10⁻⁷%; 100% and 0% mean exactly that."""
    if not math.isfinite(share):
        return "-"
    if 0 < 1 - share < 0.0005:
        return "> 99.9%"
    value = 100 * share
    return f"{value:.1f}%".replace(".0%", "%") if value >= 10 or not value else f"{short(value)}%"


def one_in(log_p: float) -> str:
    """97 in 100, 1 in 12,300, 1 in 4.2 million, 1 in 10⁵²: a probability, given by its logarithm."""
    if not math.isfinite(log_p):
        return "never"
    exponent = -log_p / math.log(10)
    if exponent >= 15:
        return f"1 in {power(exponent)}"
    times = 10**exponent
    if times < 1.0005:
        return "nearly every time" if log_p < 0 else "every time"
    if times < 1.995:
        return f"{min(100 / times, 99):.0f} in 100"
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if times >= 0.9995 * size:
            return f"1 in {times / size:.3g} {name}"
    return f"1 in {float(f'{times:.3g}'):,.0f}" if times >= 100 else f"1 in {times:.3g}"


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
    """What stands in a table: text, the number it is sorted by, and small print under it."""

    text: str
    value: float | None = None
    small: str = ""

    def html(self, column: Column) -> str:
        """The cell of a column."""
        sort = "" if column.text else f' data-v="{_sortable(self.value)}"'
        small = f'<br><small class="soft">{escape(self.small)}</small>' if self.small else ""
        return f'<td class="{"t" if column.text else "n"}"{sort}>{escape(self.text)}{small}</td>'


def _sortable(value: float | None) -> str:
    return repr(float(value)) if value is not None and math.isfinite(value) else "-1e999"


@dataclass(frozen=True)
class Group:
    """Rows under a heading of their own ("" for none), with a row of totals at their end."""

    rows: Sequence[Sequence[Cell]]
    heading: str = ""
    total: Sequence[Cell] | None = None


def table(columns: Sequence[Column], groups: Sequence[Group]) -> str:
    """A table; a click on the head of a column sorts the rows of each group by it."""
    lines = ['<div class="wide"><table><thead>']
    if any(column.over for column in columns):
        lines.append('<tr class="over">' + "".join(_spans(columns)) + "</tr>")
    lines.append("<tr>")
    for column in columns:
        hint = f' title="{escape(column.hint)}"' if column.hint else ""
        button = f'<button type="button">{escape(column.name)}</button>'
        lines.append(f'<th scope="col" class="{"t" if column.text else "n"}"{hint}>{button}</th>')
    lines.append("</tr></thead>")
    for group in groups:
        lines.append("<tbody>")
        if group.heading:
            lines.append(f'<tr class="group"><td colspan="{len(columns)}">{escape(group.heading)}</td></tr>')
        lines += [f"<tr>{_cells(row, columns)}</tr>" for row in group.rows]
        if group.total:
            lines.append(f'<tr class="total">{_cells(group.total, columns)}</tr>')
        lines.append("</tbody>")
    return "\n".join([*lines, "</table></div>"])


def _cells(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    return "".join(cell.html(column) for cell, column in zip(row, columns, strict=True))


def _spans(columns: Sequence[Column]) -> Iterable[str]:
    start = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end].over != columns[start].over:
            yield f'<th colspan="{end - start}">{escape(columns[start].over)}</th>'
            start = end


# Text by probability.


def levels_of(p: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """0 below the first of LEVELS, 1 from there, ..., 5 from the last on; 0 where no probability is known."""
    values = np.nan_to_num(np.asarray(p, dtype=np.float64))
    return np.searchsorted(np.array(LEVELS), values, side="right")


def heat_spans(text: str, p: Sequence[float | None] | np.ndarray) -> str:
    """The text in spans of one colour each; hovering shows the range of probabilities in the span."""
    values = np.asarray(p, dtype=np.float64)
    if len(values) != len(text):
        raise ValueError(f"a strip has {len(text):,} characters and {len(values):,} probabilities: one each is needed")
    parts = []
    for start, end, level in _runs(levels_of(values)):
        known = values[start:end][~np.isnan(values[start:end])]
        low, high = (percent(float(end)) for end in (known.min(), known.max())) if len(known) else ("-", "-")
        hover = low if low == high else f"{low} to {high}"
        parts.append(f'<span class="h{level}" title="{hover}">{escape(text[start:end])}</span>')
    return "".join(parts)


def heat_bar(p: Sequence[float | None] | np.ndarray, *, bins: int = 240) -> str:
    """A whole document as one narrow strip: the highest level in each of at most `bins` pieces."""
    levels = levels_of(p)
    if not len(levels):
        return ""
    edges = np.arange(min(bins, len(levels))) * len(levels) // min(bins, len(levels))
    rects = [
        f'<rect class="h{level}" x="{start}" y="0" width="{end - start}" height="1"/>'
        for start, end, level in _runs(np.maximum.reduceat(levels, edges))
    ]
    svg = f'<svg class="strip" viewBox="0 0 {len(edges)} 1" preserveAspectRatio="none" aria-hidden="true">'
    return svg + "".join(rects) + "</svg>"


def heat_key() -> str:
    """What the colours mean."""
    names = [f"below {percent(LEVELS[0])}", *(f"{percent(p)} or more" for p in LEVELS)]
    boxes = "".join(f'<span class="h{i}"><i class="box"></i>{name}</span>' for i, name in enumerate(names))
    return f'<div class="key levels">{boxes}</div>'


def _runs(levels: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, end, level) of each stretch of equal levels."""
    if not len(levels):
        return []
    starts = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist()]
    return [(a, b, int(levels[a])) for a, b in zip(starts, [*starts[1:], len(levels)], strict=True)]
