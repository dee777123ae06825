"""The memorisation report as one HTML page: what a checkpoint can recite, next to what it was never shown."""

from __future__ import annotations

import math
from typing import Any

from niels_gpt.report.charts import Series, bars, chart_key, line_chart
from niels_gpt.report.html import (
    COLOURS,
    Cell,
    Column,
    Group,
    escape,
    one_in,
    page,
    paragraph,
    percent,
    power,
    short,
    shortened,
    table,
)
from niels_gpt.report.memorization_text import how_to_read, passages, strips
from niels_gpt.system.console import plural, short_number

Document = dict[str, Any]
"""A document of the report: see `niels_gpt.evaluation`."""

_MEMORISED = "0.5"
_LN10 = math.log(10)
_MOST_BARS = 60


def memorization_page(report: dict[str, Any]) -> str:
    """The report as a page that needs nothing but itself; see the section "How to read this" on it."""
    documents = report["documents"]
    trained = [d for d in documents if not d["control"]]
    controls = [d for d in documents if d["control"]]
    colours = {d["name"]: f"c{i % COLOURS}" for i, d in enumerate(trained)} if len(trained) <= COLOURS else {}
    unit = "bytes" if report["unit"] == "byte" else "tokens"
    title = report["title"] or "What was memorised"
    return page(
        title,
        [
            *_head(report, title, unit),
            *_headline(report, trained, controls),
            "<h2>Documents</h2>",
            *_documents(report, trained, controls, unit),
            *_thresholds(trained, controls, colours),
            *_over_training(report["checkpoints"], colours, unit),
            *_discoverable(trained, controls),
            *passages(report["passages"]),
            *strips(report),
            *_positions(report, colours, unit),
            *how_to_read(report["settings"], unit),
        ],
    )


def _head(report: dict[str, Any], title: str, unit: str) -> list[str]:
    window, prompt, stride = (report["settings"][key] for key in ("window", "prompt", "stride"))
    facts = [
        report["checkpoint"],
        f"step {report['step']:,}",
        f"{short_number(report['parameters'])} parameters",
        f"{report['positions']} positions",
    ]
    text = (
        f"{', '.join(filter(None, facts))}. Windows of {window} {unit}: {prompt} of prompt, "
        f"{window - prompt} of suffix, one every {stride}."
    )
    return [f"<header><h1>{escape(title)}</h1>", paragraph(text, kind="soft"), "</header>"]


def _headline(report: dict[str, Any], trained: list[Document], controls: list[Document]) -> list[str]:
    """What came out, in plain words."""
    lines = []
    windows, memorised = _total(trained, _MEMORISED)
    if trained:
        having = sum(d["over"][_MEMORISED] > 0 for d in trained)
        number = plural(len(trained), "trained document")
        if having:
            lines.append(
                f"{having:,} of {number} can be recited, at least in part: after a true prompt, {memorised:,} of "
                f"{plural(windows, 'window')} ({percent(memorised / windows)}) come back word for word with a "
                "probability of 50% or more."
            )
        else:
            lines.append(
                f"0 of {number} can be recited: after a true prompt, none of {plural(windows, 'window')} comes back "
                "word for word with a probability of 50% or more."
            )
        best = max(trained, key=lambda d: _best_log_p(report, d))
        log_p = _best_log_p(report, best)
        lines.append(f"The strongest passage is in “{best['name']}”: {percent(best['max_p'])}, {one_in(log_p)}.")
    else:
        lines.append("There are no trained documents in this report, only controls.")
    if report.get("position_map"):
        lines.append(_elsewhere(report["position_map"]))
    if not controls:
        lines.append("There are no control documents, so what can be guessed without training is not known.")
        return ['<div class="lead">', *map(paragraph, lines), "</div>"]
    windows, guessed = _total(controls, _MEMORISED)
    strongest = max(_best_log_p(report, d) for d in controls)
    text = (
        f"Of {plural(len(controls), 'control document')}, never trained on, {guessed:,} of {windows:,} windows come "
        f"back so; the strongest is {one_in(strongest)}."
    )
    if trained:
        gap = (_mean_log_p(trained) - _mean_log_p(controls)) / _LN10
        times = power(gap) if abs(gap) >= 4 else f"{float(f'{10**gap:.2g}'):g}"
        text += f" On the (geometric) average, a trained suffix is {times} times as likely as one of a control."
    return ['<div class="lead">', *map(paragraph, [*lines, text]), "</div>"]


def _elsewhere(places: dict[str, Any]) -> str:
    """That a model with learned positions may know a text at another place of the frame."""
    best = max(
        ((d["best_p"], d["best_offset"], d["name"]) for d in places["documents"] if not d["control"]), default=None
    )
    text = "Positions are learned, and all this is for texts at the beginning of the frame."
    if best is not None:
        text += f" At place {best[1]} a window of “{best[2]}” has a P(z) of {percent(best[0])}: the most of all places."
    return text


def _total(documents: list[Document], threshold: str) -> tuple[int, int]:
    """How many windows, and how many of them over a threshold."""
    return sum(d["windows"] for d in documents), sum(d["over"][threshold] for d in documents)


def _mean_log_p(documents: list[Document]) -> float:
    """The mean of log P(z) over all windows."""
    windows = sum(d["windows"] for d in documents)
    return sum(d["windows"] * d["mean_log_p"] for d in documents) / max(windows, 1)


def _best_log_p(report: dict[str, Any], document: dict[str, Any]) -> float:
    """log of the largest P(z), from the passages where the number itself is too small for a float."""
    if document["max_p"] > 0:
        return math.log(document["max_p"])
    known = [p["log_p"] for p in report["passages"] if p["document"] == document["name"]]
    return max(known, default=-math.inf)


def _documents(report: dict[str, Any], trained: list[Document], controls: list[Document], unit: str) -> list[str]:
    groups = [("Trained on", trained), ("Control: never trained on", controls)]
    groups = [(heading, documents) for heading, documents in groups if documents]
    thresholds = sorted({t for d in report["documents"] for t in d["over"]}, key=float)
    columns = [
        Column("Document", text=True),
        Column(unit.capitalize()),
        Column("Windows"),
        Column("mean", over="P(z)", hint="mean of P(z) over the windows"),
        Column("median", over="P(z)"),
        Column("max", over="P(z)"),
        *(Column(percent(float(t)), over="windows with P(z) of at least") for t in thresholds),
    ]
    first = []
    for heading, documents in groups:
        rows = [
            [
                Cell(d["name"], small=_small_print(d)),
                _number(d["tokens"]),
                _number(d["windows"]),
                *(Cell(short(d[key]), d[key]) for key in ("mean_p", "median_p", "max_p")),
                *(_number(d["over"].get(t, 0)) for t in thresholds),
            ]
            for d in documents
        ]
        first.append(Group(rows, heading, _totals(documents, thresholds) if len(rows) > 1 else None))
    return [table(columns, first), *_greedy_and_loss(groups, report["settings"]["greedy"], unit)]


def _greedy_and_loss(groups: list[tuple[str, list[Document]]], greedy: int, unit: str) -> list[str]:
    """The second table; without its first columns where nothing was decoded greedily."""
    columns = [
        Column("equal", over=f"greedy {greedy}", hint=f"share of {unit} equal to the text's"),
        Column("exact", over=f"greedy {greedy}", hint="continuations equal from beginning to end"),
        Column(unit, over="longest verbatim run"),
        Column("text", text=True, over="longest verbatim run"),
        Column("nats", over="loss", hint=f"nats per {unit[:-1]}"),
        Column("bits/byte", over="loss"),
    ]

    def row(d: Document) -> list[Cell]:
        share = d["greedy"]["share"]
        return [
            Cell("-" if share is None else percent(share), share),
            Cell(f"{d['greedy']['exact']:,} of {d['greedy']['starts']:,}", d["greedy"]["exact"]),
            _number(d["longest_run"]["tokens"]),
            Cell(shortened(d["longest_run"]["text"], 80)),
            *(Cell(f"{d[key]:.3f}".replace("nan", "-"), d[key]) for key in ("nats_per_token", "bits_per_byte")),
        ]

    left_out = 0 if greedy else 4
    parts = [Group([[Cell(d["name"]), *row(d)[left_out:]] for d in ds], heading) for heading, ds in groups]
    heading = "Greedy decoding and loss" if greedy else "Loss"
    return [f"<h3>{heading}</h3>", table([Column("Document", text=True), *columns[left_out:]], parts)]


def _small_print(document: dict[str, Any]) -> str:
    source = document["source"] if document["source"] != document["name"] else ""
    marked = "shorter than a window" if document["short"] else ""
    return ", ".join(part for part in (source, marked) if part)


def _number(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def _totals(documents: list[Document], thresholds: list[str]) -> list[Cell]:
    windows = sum(d["windows"] for d in documents)
    mean = sum(d["windows"] * d["mean_p"] for d in documents) / max(windows, 1)
    best = max(d["max_p"] for d in documents)
    over = [sum(d["over"].get(t, 0) for d in documents) for t in thresholds]
    return [
        Cell("all"),
        _number(sum(d["tokens"] for d in documents)),
        _number(windows),
        Cell(short(mean), mean),
        Cell(""),
        Cell(short(best), best),
        *map(_number, over),
    ]


def _series(
    documents: list[Document], colours: dict[str, str], x: list[list[float]], y: list[list[float]], **style: Any
) -> list[Series]:
    """A line per document, controls dashed and drawn first; few documents have a colour each, many share one."""
    trained = sum(not d["control"] for d in documents)
    lines = []
    for document, xs, ys in zip(documents, x, y, strict=True):
        name = document["name"]
        if document["control"]:
            label, colour, look = plural(len(documents) - trained, "control document"), "ctl", "dash"
        elif colours:
            label, colour, look = name, colours.get(name, "c0"), ""
        else:
            label, colour, look = plural(trained, "trained document"), "c0", "faint"
        hover = f"{name} (control)" if document["control"] else name
        lines.append(Series(hover, xs, ys, colour=colour, label=shortened(label, 40, end=14), style=look, **style))
    return sorted(lines, key=lambda line: line.colour != "ctl")


def _thresholds(trained: list[Document], controls: list[Document], colours: dict[str, str]) -> list[str]:
    """The share of windows over each threshold, and the strongest window of each document."""
    documents = trained + controls
    if not documents:
        return []
    x = [sorted(map(float, d["over"])) for d in documents]
    y = [[100 * d["over"][t] / max(d["windows"], 1) for t in sorted(d["over"], key=float)] for d in documents]
    chart = line_chart(
        _series(documents, colours, x, y, dots=True),
        title="Share of the windows with at least this P(z)",
        x_label="P(z)",
        y_label="% of windows",
        x_scale="log",
        x_ticks=[(t, percent(t)) for t in sorted({t for ts in x for t in ts})],
        y_low=0,
        y_high=1,
        size=(960, 300),
    )
    shown = sorted(trained, key=lambda d: -d["max_p"])[:_MOST_BARS] + controls[:_MOST_BARS]
    rows = [
        (
            d["name"],
            max(d["max_p"], 1e-300),
            percent(d["max_p"]),
            "ctl" if d["control"] else colours.get(d["name"], "c0"),
        )
        for d in shown
    ]
    parts = [
        "<h2>How much of each document</h2>",
        chart,
        bars(rows, title="The strongest window of each document: largest P(z)", low=1e-12, high=1, scale="log"),
    ]
    if len(shown) < len(documents):
        parts.append(
            paragraph(f"The {len(documents) - len(shown):,} documents not drawn are in the table.", kind="soft")
        )
    return parts


def _over_training(checkpoints: list[dict[str, Any]], colours: dict[str, str], unit: str) -> list[str]:
    """Curves per document over the checkpoints of the run."""
    if not checkpoints:
        return []
    checkpoints = sorted(checkpoints, key=lambda c: c["step"])
    documents = list({d["name"]: d for c in checkpoints for d in c["documents"]}.values())
    found = [{d["name"]: d for d in c["documents"]} for c in checkpoints]
    x: list[list[float]] = [[c["step"] for c in checkpoints]] * len(documents)

    def lines(key: str, factor: float) -> list[Series]:
        y = [[factor * at[d["name"]][key] if d["name"] in at else math.nan for at in found] for d in documents]
        return _series(documents, colours, x, y, dots=len(checkpoints) <= 40)

    def chart(key: str, factor: float, **options: Any) -> str:
        return line_chart(lines(key, factor), x_label="step", key=False, **options)

    return [
        "<h2>Over training</h2>",
        chart_key(lines("mean_p", 1)),
        '<div class="grid">',
        chart("memorised", 100, title="Memorised: P(z) of 50% or more", y_label="% of windows", y_low=0, y_high=1),
        chart("mean_log_p", 1 / _LN10, title="P(z), geometric mean", y_label="P(z)", y_scale="exponent", y_high=0),
        chart("mean_p", 100, title="P(z), mean", y_label="P(z) in %", y_low=0, y_high=1),
        chart("nats_per_token", 1, title="Loss", y_label=f"nats per {unit[:-1]}", y_low=0),
        "</div>",
    ]


def _discoverable(trained: list[Document], controls: list[Document]) -> list[str]:
    """(n, p): which windows turn up in n samples with probability p."""
    documents = trained + controls
    tries = sorted({n for d in documents for n in d["discoverable"]}, key=int)
    chances = sorted({p for d in documents for n in d["discoverable"].values() for p in n}, key=float)
    if not tries:
        return []
    kinds = [(name, ds) for name, ds in (("trained", trained), ("control", controls)) if ds]
    columns = [Column("n samples")]
    columns += [
        Column(f"p ≥ {percent(float(p))}", over=f"{kind}: windows that turn up with probability p")
        for kind, _ in kinds
        for p in chances
    ]
    rows = []
    for n in tries:
        row = [_number(int(n))]
        for _, ds in kinds:
            windows = max(sum(d["windows"] for d in ds), 1)
            for p in chances:
                number = sum(d["discoverable"][n][p] for d in ds)
                row.append(Cell(f"{number:,}", number, small=percent(number / windows)))
        rows.append(row)
    middle = chances[len(chances) // 2]
    per_document = table(
        [Column("Document", text=True), *(Column(f"n = {int(n):,}") for n in tries)],
        [
            Group([[Cell(d["name"]), *(_number(d["discoverable"][n][middle]) for n in tries)] for d in ds], heading)
            for heading, ds in (("Trained on", trained), ("Control", controls))
            if ds
        ],
    )
    return [
        "<h2>Sampling n times</h2>",
        paragraph(
            "Whoever samples often enough finds more than the likeliest passages. A window counts where, with "
            "probability p or more, one of n samples (temperature 1, after the true prompt) is the true suffix."
        ),
        table(columns, [Group(rows)]),
        f"<details><summary>Each document, p ≥ {percent(float(middle))}</summary>{per_document}</details>",
    ]


def _positions(report: dict[str, Any], colours: dict[str, str], unit: str) -> list[str]:
    """P(z) over the place in the frame, where the place matters."""
    found = report["position_map"]
    if found:
        documents = found["documents"]
        x = [list(map(float, found["offsets"]))] * len(documents)
        y = [[value / _LN10 for value in d["mean_log_p"]] for d in documents]
        chart = line_chart(
            _series(documents, colours, x, y, dots=len(found["offsets"]) <= 40),
            title="P(z) by place in the frame, geometric mean over the windows",
            x_label=f"{unit} before the text",
            y_label="P(z)",
            y_scale="exponent",
            y_high=0,
            size=(960, 300),
        )
        text = "Positions are learned, so a text can be known at one place in the frame and not at another."
        return ["<h2>Place in the frame</h2>", paragraph(text), chart]
    if report["positions"] == "rope":
        text = (
            "With rotary positions and a segment mask, attention sees only distances within the text: P(z) does not "
            "depend on where in the frame the text lies. A map over places would be flat, so none is drawn."
        )
        return ["<h2>Place in the frame</h2>", paragraph(text)]
    return []
