"""The memorization report as one HTML page: what a checkpoint can recite, compared with the controls."""

from __future__ import annotations

import math
from typing import Any

from niels_gpt.report.charts import Bar, Series, bar_chart, chart_key, line_chart
from niels_gpt.report.html import COLORS, Cell, Column, Group, count_cell, heat_key, render, table
from niels_gpt.report.numbers import one_in, percent, power, short, shorten
from niels_gpt.system.console import plural, short_number

Document = dict[str, Any]
"""A document of the report, see `memorization.summary.document_row`."""

_MEMORIZED = "0.5"
_LN10 = math.log(10)
_MAX_BARS = 60
_MAX_PASSAGES = 40
_MAX_CHARACTERS = 2_000_000
"""Characters of all strips on a page."""
_OPEN_CHARACTERS = 2_500
"""The first strip of at most so many characters is open."""


def memorization_page(report: dict[str, Any]) -> str:
    """Return a self-contained page of a report (see `memorization.summary.build_report`)."""
    documents, settings = report["documents"], report["settings"]
    trained = [d for d in documents if not d["control"]]
    controls = [d for d in documents if d["control"]]
    colors = {d["name"]: f"c{i % COLORS}" for i, d in enumerate(trained)} if len(trained) <= COLORS else {}
    groups = [("Trained on", trained), ("Control: never trained on", controls)]
    groups = [(heading, members) for heading, members in groups if members]
    facts = [
        report["checkpoint"],
        f"step {report['step']:,}",
        f"{short_number(report['parameters'])} parameters",
        f"{report['positions']} positions",
    ]
    page = render(
        "memorization.html",
        **{name: settings[name] for name in ("window", "prompt", "stride", "greedy")},
        title=report["title"] or "What was memorized",
        facts=", ".join(filter(None, facts)),
        unit=report["unit"],
        base=report.get("base", ""),
        by_suffix=settings["map"] == "suffix",
        headline=headline(report),
        documents_table=_documents_table(report, groups),
        loss_table=_loss_table(groups, settings["greedy"], report["unit"]),
        thresholds=_thresholds(trained, controls, colors),
        over_training=_over_training(report["checkpoints"], colors, report["unit"]),
        discoverable=_discoverable(trained, controls),
        passages=report["passages"],
        max_passages=_MAX_PASSAGES,
        heat_key=heat_key(),
        **_strips(report["strips"]),
        positions=report["positions"],
        position_chart=_position_chart(report["position_map"], colors, report["unit"]),
    )
    return str(page)


def headline(report: dict[str, Any]) -> list[str]:
    """Return the result in a few sentences."""
    trained, controls = ([d for d in report["documents"] if d["control"] == control] for control in (False, True))
    lines = []
    windows, memorized = _total(trained, _MEMORIZED)
    if trained:
        number, recited = plural(len(trained), "trained document"), sum(d["over"][_MEMORIZED] > 0 for d in trained)
        if recited:
            lines.append(
                f"{recited:,} of {number} can be recited, at least in part: after a true prompt, {memorized:,} of "
                f"{plural(windows, 'window')} ({percent(memorized / windows)}) come back word for word with a "
                "probability of 50% or more."
            )
        else:
            lines.append(
                f"0 of {number} can be recited: after a true prompt, none of {plural(windows, 'window')} comes back "
                "word for word with a probability of 50% or more."
            )
        best = max(trained, key=lambda d: _best_log_p(report, d))
        log_p = _best_log_p(report, best)
        if report.get("base"):
            known = sum(d["base"]["over"][_MEMORIZED] for d in trained)
            lines.append(
                f"The base, before the fine-tuning, recites {known:,} of these windows; its mean P(z) is "
                f"{percent(_mean_p([d['base'] | {'windows': d['windows']} for d in trained]))}, this model's "
                f"{percent(_mean_p(trained))}."
            )
        lines.append(f"The strongest passage is in “{best['name']}”: {percent(best['max_p'])}, {one_in(log_p)}.")
    else:
        lines.append("There are no trained documents in this report, only controls.")
    if report.get("position_map"):
        lines.append(_best_position(report["position_map"]))
    if not controls:
        lines.append("There are no control documents, so what can be guessed without training is not known.")
        return lines
    windows, guessed = _total(controls, _MEMORIZED)
    strongest = max(_best_log_p(report, d) for d in controls)
    text = (
        f"Of {plural(len(controls), 'control document')}, never trained on, {guessed:,} of {windows:,} windows come "
        f"back like this; the strongest is {one_in(strongest)}."
    )
    if trained:
        gap = (_mean_log_p(trained) - _mean_log_p(controls)) / _LN10
        times = power(gap) if abs(gap) >= 4 else f"{float(f'{10**gap:.2g}'):g}"
        text += f" On the (geometric) average, a trained suffix is {times} times as likely as one of a control."
    return [*lines, text]


def _best_position(position_map: dict[str, Any]) -> str:
    """Say that a model with learned positions may know a text at another offset."""
    best = max(
        ((d["best_p"], d["best_offset"], d["name"]) for d in position_map["documents"] if not d["control"]),
        default=None,
    )
    text = "Positions are learned, and these results are for texts at offset 0 in the frame."
    if best is not None:
        text += f" At offset {best[1]} a window of “{best[2]}” has a P(z) of {percent(best[0])}, the highest of all."
    return text


def _total(documents: list[Document], threshold: str) -> tuple[int, int]:
    """Return (windows, windows over a threshold)."""
    return sum(d["windows"] for d in documents), sum(d["over"][threshold] for d in documents)


def _mean_p(documents: list[Document]) -> float:
    """Return the mean of P(z) over all windows."""
    return sum(d["windows"] * d["mean_p"] for d in documents) / max(sum(d["windows"] for d in documents), 1)


def _mean_log_p(documents: list[Document]) -> float:
    """Return the mean of log P(z) over all windows."""
    windows = sum(d["windows"] for d in documents)
    return sum(d["windows"] * d["mean_log_p"] for d in documents) / max(windows, 1)


def _best_log_p(report: dict[str, Any], document: Document) -> float:
    """Return the logarithm of the largest P(z); from the passages if P(z) underflows a float."""
    if document["max_p"] > 0:
        return math.log(document["max_p"])
    known = [p["log_p"] for p in report["passages"] if p["document"] == document["name"]]
    return max(known, default=-math.inf)


def _documents_table(report: dict[str, Any], groups: list[tuple[str, list[Document]]]) -> str:
    """Return the table of P(z) by document."""
    thresholds = sorted({t for d in report["documents"] for t in d["over"]}, key=float)
    compared = ("mean", "max") if report.get("base") else ()
    columns = [
        Column("Document", text=True),
        Column(f"{report['unit'].capitalize()}s"),
        Column("Windows"),
        Column("mean", over="P(z)", hint="mean of P(z) over the windows"),
        Column("median", over="P(z)"),
        Column("max", over="P(z)"),
        *(Column(name, over="P(z) of the base", hint="under the model before the fine-tuning") for name in compared),
        *(Column(percent(float(t)), over="windows with P(z) of at least") for t in thresholds),
    ]
    table_groups = []
    for heading, documents in groups:
        rows = [
            [
                Cell(d["name"], small=_small_print(d)),
                count_cell(d["tokens"]),
                count_cell(d["windows"]),
                *(Cell(short(d[key]), d[key]) for key in ("mean_p", "median_p", "max_p")),
                *(Cell(short(d["base"][f"{name}_p"]), d["base"][f"{name}_p"]) for name in compared),
                *(count_cell(d["over"].get(t, 0)) for t in thresholds),
            ]
            for d in documents
        ]
        totals = _totals(documents, thresholds, compared=bool(compared)) if len(rows) > 1 else None
        table_groups.append(Group(rows, heading, totals))
    return table(columns, table_groups)


def _small_print(document: Document) -> str:
    source = document["source"] if document["source"] != document["name"] else ""
    return ", ".join(filter(None, (source, "shorter than a window" if document["short"] else "")))


def _totals(documents: list[Document], thresholds: list[str], *, compared: bool) -> list[Cell]:
    windows = sum(d["windows"] for d in documents)

    def mean_and_max(rows: list[Document]) -> list[Cell]:
        pairs = zip(documents, rows, strict=True)
        mean = sum(d["windows"] * row["mean_p"] for d, row in pairs) / max(windows, 1)
        best = max(row["max_p"] for row in rows)
        return [Cell(short(mean), mean), Cell(short(best), best)]

    mean, best = mean_and_max(documents)
    over = [sum(d["over"].get(t, 0) for d in documents) for t in thresholds]
    return [
        Cell("all"),
        count_cell(sum(d["tokens"] for d in documents)),
        count_cell(windows),
        mean,
        Cell(""),
        best,
        *(mean_and_max([d["base"] for d in documents]) if compared else ()),
        *map(count_cell, over),
    ]


def _loss_table(groups: list[tuple[str, list[Document]]], greedy: int, unit: str) -> str:
    """Return the table of greedy decoding and loss; without greedy decoding, of the loss only."""
    columns = [
        Column("equal", over=f"greedy {greedy}", hint=f"share of {unit}s equal to the text"),
        Column("exact", over=f"greedy {greedy}", hint="continuations that equal the text completely"),
        Column(f"{unit}s", over="longest verbatim run"),
        Column("text", text=True, over="longest verbatim run"),
        Column("nats", over="loss", hint=f"nats per {unit}"),
        Column("bits/byte", over="loss"),
    ]

    def row(d: Document) -> list[Cell]:
        share = d["greedy"]["share"]
        return [
            Cell("-" if share is None else percent(share), share),
            Cell(f"{d['greedy']['exact']:,} of {d['greedy']['starts']:,}", d["greedy"]["exact"]),
            count_cell(d["longest_run"]["tokens"]),
            Cell(shorten(d["longest_run"]["text"], 80)),
            *(Cell(f"{d[key]:.3f}".replace("nan", "-"), d[key]) for key in ("nats_per_token", "bits_per_byte")),
        ]

    first = 0 if greedy else 4
    table_groups = [Group([[Cell(d["name"]), *row(d)[first:]] for d in ds], heading) for heading, ds in groups]
    return table([Column("Document", text=True), *columns[first:]], table_groups)


def _series(
    documents: list[Document], colors: dict[str, str], x: list[list[float]], y: list[list[float]], *, dots: bool
) -> list[Series]:
    """Return a line per document, controls dashed and drawn first; few documents have a color each, many share one."""
    trained = sum(not d["control"] for d in documents)
    lines = []
    for document, xs, ys in zip(documents, x, y, strict=True):
        name = document["name"]
        if document["control"]:
            label, color, style = plural(len(documents) - trained, "control document"), "ctl", "dash"
        elif colors:
            label, color, style = name, colors.get(name, "c0"), ""
        else:
            label, color, style = plural(trained, "trained document"), "c0", "faint"
        hover = f"{name} (control)" if document["control"] else name
        lines.append(Series(hover, xs, ys, color=color, label=shorten(label, 40, end=14), style=style, dots=dots))
    return sorted(lines, key=lambda line: line.color != "ctl")


def _thresholds(trained: list[Document], controls: list[Document], colors: dict[str, str]) -> dict[str, Any] | None:
    """Return charts of the windows over each threshold and of the strongest window of each document."""
    documents = trained + controls
    if not documents:
        return None
    x = [sorted(map(float, d["over"])) for d in documents]
    y = [[100 * d["over"][t] / max(d["windows"], 1) for t in sorted(d["over"], key=float)] for d in documents]
    chart = line_chart(
        _series(documents, colors, x, y, dots=True),
        title="Share of the windows with at least this P(z)",
        x_label="P(z)",
        y_label="% of windows",
        x_scale="log",
        x_ticks=[(t, percent(t)) for t in sorted({t for ts in x for t in ts})],
        y_low=0,
        y_high=1,
        size=(960, 300),
    )
    drawn = sorted(trained, key=lambda d: -d["max_p"])[:_MAX_BARS] + controls[:_MAX_BARS]
    bars = [
        Bar(
            d["name"],
            max(d["max_p"], 1e-300),
            percent(d["max_p"]),
            "ctl" if d["control"] else colors.get(d["name"], "c0"),
        )
        for d in drawn
    ]
    title = "The strongest window of each document: largest P(z)"
    return {
        "chart": chart,
        "bars": bar_chart(bars, title=title, low=1e-12, high=1, scale="log"),
        "hidden": len(documents) - len(drawn),
    }


def _over_training(checkpoints: list[dict[str, Any]], colors: dict[str, str], unit: str) -> dict[str, Any] | None:
    """Return curves per document over the checkpoints of the run."""
    if not checkpoints:
        return None
    checkpoints = sorted(checkpoints, key=lambda c: c["step"])
    documents = list({d["name"]: d for c in checkpoints for d in c["documents"]}.values())
    by_name = [{d["name"]: d for d in c["documents"]} for c in checkpoints]
    x: list[list[float]] = [[c["step"] for c in checkpoints]] * len(documents)

    def lines(key: str, factor: float) -> list[Series]:
        y = [[factor * at[d["name"]][key] if d["name"] in at else math.nan for at in by_name] for d in documents]
        return _series(documents, colors, x, y, dots=len(checkpoints) <= 40)

    def chart(key: str, factor: float, **options: Any) -> str:
        return line_chart(lines(key, factor), x_label="step", key=False, **options)

    return {
        "key": chart_key(lines("mean_p", 1)),
        "charts": [
            chart("memorized", 100, title="Memorized: P(z) of 50% or more", y_label="% of windows", y_low=0, y_high=1),
            chart("mean_log_p", 1 / _LN10, title="P(z), geometric mean", y_label="P(z)", y_scale="exponent", y_high=0),
            chart("mean_p", 100, title="P(z), mean", y_label="P(z) in %", y_low=0, y_high=1),
            chart("nats_per_token", 1, title="Loss", y_label=f"nats per {unit}", y_low=0),
        ],
    }


def _discoverable(trained: list[Document], controls: list[Document]) -> dict[str, Any] | None:
    """Return tables of the (n, p)-discoverable windows: in n samples, with probability p."""
    documents = trained + controls
    samples = sorted({n for d in documents for n in d["discoverable"]}, key=int)
    chances = sorted({p for d in documents for n in d["discoverable"].values() for p in n}, key=float)
    if not samples:
        return None
    kinds = [(name, ds) for name, ds in (("trained", trained), ("control", controls)) if ds]
    columns = [Column("n samples")]
    columns += [
        Column(f"p ≥ {percent(float(p))}", over=f"{kind}: windows that turn up with probability p")
        for kind, _ in kinds
        for p in chances
    ]
    rows = []
    for n in samples:
        row = [count_cell(int(n))]
        for _, ds in kinds:
            windows = max(sum(d["windows"] for d in ds), 1)
            for p in chances:
                number = sum(d["discoverable"][n][p] for d in ds)
                row.append(Cell(f"{number:,}", number, small=percent(number / windows)))
        rows.append(row)
    middle = chances[len(chances) // 2]
    per_document = table(
        [Column("Document", text=True), *(Column(f"n = {int(n):,}") for n in samples)],
        [
            Group(
                [[Cell(d["name"]), *(count_cell(d["discoverable"][n][middle]) for n in samples)] for d in ds], heading
            )
            for heading, ds in (("Trained on", trained), ("Control", controls))
            if ds
        ],
    )
    return {"table": table(columns, [Group(rows)]), "per_document": per_document, "middle": percent(float(middle))}


def _strips(strips: list[dict[str, Any]]) -> dict[str, Any]:
    """Select the strips that fit the page (at least one), and the one that is open."""
    total = 0
    shown: list[dict[str, Any]] = []
    for strip in strips:
        total += len(strip["text"])
        if total > _MAX_CHARACTERS and shown:
            break
        shown.append(strip)
    small = (i for i, strip in enumerate(shown) if len(strip["text"]) <= _OPEN_CHARACTERS)
    return {"strips": shown, "hidden_strips": len(strips) - len(shown), "open_strip": next(small, -1)}


def _position_chart(position_map: dict[str, Any] | None, colors: dict[str, str], unit: str) -> str | None:
    """Return the chart of P(z) over the offset in the frame, for learned positions."""
    if not position_map:
        return None
    documents = position_map["documents"]
    return line_chart(
        _series(
            documents,
            colors,
            [list(map(float, position_map["offsets"]))] * len(documents),
            [[value / _LN10 for value in d["mean_log_p"]] for d in documents],
            dots=len(position_map["offsets"]) <= 40,
        ),
        title="P(z) by offset in the frame, geometric mean over the windows",
        x_label=f"{unit}s before the text",
        y_label="P(z)",
        y_scale="exponent",
        y_high=0,
        size=(960, 300),
    )
