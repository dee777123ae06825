"""The memorization report: what a checkpoint can recite, as JSON, CSV tables and an HTML page."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.memorization.audit import passage_origin
from niels_gpt.memorization.measure import Measurement
from niels_gpt.report.charts import COLORS, Bar, BarChart, Chart, Series
from niels_gpt.report.document import (
    Block,
    Cell,
    Charts,
    Column,
    Details,
    Document,
    Group,
    HeatKey,
    HeatText,
    Items,
    Lead,
    Paragraph,
    Passage,
    Prose,
    Section,
    Table,
    count_cell,
    html_page,
)
from niels_gpt.report.numbers import one_in, percent, power, short, shorten
from niels_gpt.system import files
from niels_gpt.system.console import first_few, plural, short_number
from niels_gpt.system.terminal import neutralize

Row = dict[str, Any]
"""A document of the report, see `memorization.summary.document_row`."""

_FORMULA = ("=", "+", "-", "@", "\t", "\n")
_MEMORIZED = "0.5"
_LN10 = math.log(10)
_MAX_BARS = 60
_MAX_PASSAGES = 40
_MAX_CHARACTERS = 2_000_000
"""Characters of all strips on a page."""
_OPEN_CHARACTERS = 2_500
"""The first strip of at most so many characters is open."""
_MAX_OPEN_SECRETS = 20


def write_report(folder: Path, report: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """Write report.json, documents.csv, windows.csv and report.html into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "report.json", report)
    write_documents_csv(folder / "documents.csv", report)
    write_windows_csv(folder / "windows.csv", measurements)
    files.write_text(folder / "report.html", memorization_page(report))


def write_documents_csv(path: Path, report: dict[str, Any]) -> None:
    """Write one line per document with all its results; those of a dict get a column each, as in `over_0.5`."""
    rows = [dict(_flat(document)) for document in report["documents"]]
    _write_csv(path, list(rows[0]), [list(row.values()) for row in rows])


def write_windows_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write one line per window.

    `greedy_run` counts decoded tokens only; `greedy_share` is empty where the text ends before the decoded tokens. With
    a base there is `base_log_p`, empty where it was not measured.
    """
    header = ["document", "control", "start", "end", "log_p", "p", "greedy_share", "greedy_run"]
    rows = []
    compared = any(m.base_log_p is not None for m in measurements)
    header += ["base_log_p"] if compared else []
    for m in measurements:
        columns = [m.starts, m.ends, m.log_p, m.p, m.greedy_share, m.greedy_run]
        columns += [m.base_log_p] if m.base_log_p is not None else []
        for values in zip(*(column.tolist() for column in columns), strict=True):
            rows.append([m.document.name, m.document.control, *("" if v != v else v for v in values)])
    _write_csv(path, header, rows)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the entries of nested dicts with names joined by _; texts of passages are skipped."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif key != "text":
            yield f"{prefix}{key}", "" if value is None else value


def _cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet executes: text that would begin a formula gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = neutralize(value)  # csv does not quote a \r, and spreadsheets skip one before a formula
    return f"'{text}" if text.startswith(_FORMULA) else text


def _write_csv(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in (header, *rows))
    # A file name that is not utf-8 keeps its escape.
    files.write_text(path, out.getvalue().encode("utf-8", errors="backslashreplace").decode("utf-8"))


# --- page --------------------------------------------------------------------------------------------


def memorization_page(report: dict[str, Any]) -> str:
    """Return a self-contained page of a report (see `memorization.summary.build_report`)."""
    documents, settings, unit = report["documents"], report["settings"], report["unit"]
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
    window, prompt = settings["window"], settings["prompt"]
    about = (
        f"{', '.join(filter(None, facts))}. Windows of {window} {unit}s: {prompt} of prompt, {window - prompt} of "
        f"suffix, one every {settings['stride']}."
    )
    top: list[Block] = [Paragraph(about, soft=True), Lead(headline(report))]
    audit = report.get("audit", {})
    by_suffix = settings["map"] == "suffix"
    terms = {**settings, "unit": unit, "audit": audit, "base": report.get("base", ""), "by_suffix": by_suffix}
    sections = [
        Section("", top[::-1] if audit else top),
        Section("Secrets in the notes", _secrets(audit.get("secrets", ()))),
        Section("Private pieces of the vocabulary", _private_pieces(audit)),
        Section("Documents", [_documents_table(report, groups)]),
        Section(
            "Greedy decoding and loss" if settings["greedy"] else "Loss",
            [_loss_table(groups, settings["greedy"], unit)],
            level=3,
        ),
        Section("How much of each document", _thresholds(trained, controls, colors)),
        Section("Over training", _over_training(report["checkpoints"], colors, unit)),
        Section("Sampling n times", _discoverable(groups)),
        Section("Strongest passages", _passages(report)),
        Section("Where in the text", _strips(report["strips"], by_suffix=by_suffix)),
        Section("Offset in the frame", _positions(report, colors)),
        Section("How to read this", [Prose("memorization_terms.html", terms)]),
    ]
    return html_page(
        Document(report["title"] or "What was memorized", "", [section for section in sections if section.blocks])
    )


def headline(report: dict[str, Any]) -> list[str]:
    """Return the result in a few sentences; of an audit, its verdict."""
    if "audit" in report:
        return [str(line) for line in report["audit"]["lines"]]
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
                f"{percent(_mean(_bases(trained), 'mean_p'))}, this model's "
                f"{percent(_mean(trained, 'mean_p'))}."
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
        gap = (_mean(trained, "mean_log_p") - _mean(controls, "mean_log_p")) / _LN10
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


def _total(documents: list[Row], threshold: str) -> tuple[int, int]:
    """Return (windows, windows over a threshold)."""
    return sum(d["windows"] for d in documents), sum(d["over"][threshold] for d in documents)


def _mean(documents: list[Row], key: str) -> float:
    """Return the mean of a value over all windows."""
    return sum(d["windows"] * d[key] for d in documents) / max(sum(d["windows"] for d in documents), 1)


def _bases(documents: list[Row]) -> list[Row]:
    """Return the results of documents under the base."""
    return [d["base"] | {"windows": d["windows"]} for d in documents]


def _best_log_p(report: dict[str, Any], document: Row) -> float:
    """Return the logarithm of the largest P(z); from the passages if P(z) underflows a float."""
    if document["max_p"] > 0:
        return math.log(document["max_p"])
    known = [p["log_p"] for p in report["passages"] if p["document"] == document["name"]]
    return max(known, default=-math.inf)


def _secrets(secrets: Sequence[dict[str, Any]]) -> list[Block]:
    """Return which secrets are recited, not the secrets themselves."""
    if not secrets:
        return []
    lines = [
        [
            ("", f"{s['path']}:{s['line']} {s['kind']}: "),
            ("b", "recited" if s["recited"] else "not recited"),
            ("", f", {one_in(s['log_p'])}"),
        ]
        for s in secrets
    ]
    recited = f"{sum(s['recited'] for s in secrets)} of {len(secrets)} are recited"
    about = "The probability of each after the text before it; the secrets themselves are not shown."
    return [Paragraph(about), Details(recited, [Items(lines)], open=len(secrets) <= _MAX_OPEN_SECRETS)]


def _private_pieces(audit: dict[str, Any]) -> list[Block]:
    pieces = audit.get("private_pieces")
    if not pieces:
        return []
    about = (
        f"They stand in fewer than {audit['min_notes']} notes and in no public text; whoever has the tokenizer can "
        "read them."
    )
    return [Paragraph(about), Items([[("", f"{p['piece']} "), ("soft", plural(p["notes"], "note"))] for p in pieces])]


def _documents_table(report: dict[str, Any], groups: list[tuple[str, list[Row]]]) -> Table:
    """Return the table of P(z) by document."""
    thresholds = sorted({t for d in report["documents"] for t in d["over"]}, key=float)
    compared = ("mean_p", "max_p") if report.get("base") else ()
    columns = [
        Column("Document", text=True),
        Column(f"{report['unit'].capitalize()}s"),
        Column("Windows"),
        Column("mean", over="P(z)", hint="mean of P(z) over the windows"),
        Column("median", over="P(z)"),
        Column("max", over="P(z)"),
        *(Column(k[:-2], over="P(z) of the base", hint="under the model before the fine-tuning") for k in compared),
        *(Column(percent(float(t)), over="windows with P(z) of at least") for t in thresholds),
    ]

    def row(d: Row) -> list[Cell]:
        values = [*(d[key] for key in ("mean_p", "median_p", "max_p")), *(d["base"][key] for key in compared)]
        return [
            Cell(d["name"], small=_small_print(d)),
            count_cell(d["tokens"]),
            count_cell(d["windows"]),
            *(Cell("" if value is None else short(value), value) for value in values),
            *(count_cell(d["over"].get(t, 0)) for t in thresholds),
        ]

    return Table(
        columns,
        groups=[
            Group([row(d) for d in ds], heading, row(_all(ds, compared)) if len(ds) > 1 else None)
            for heading, ds in groups
        ],
    )


def _small_print(document: Row) -> str:
    source = document["source"] if document["source"] != document["name"] else ""
    return ", ".join(filter(None, (source, "shorter than a window" if document["short"] else "")))


def _all(documents: list[Row], compared: Sequence[str]) -> Row:
    """Return the row of all documents together."""
    total: Row = {"name": "all", "source": "all", "short": False, "median_p": None}
    total |= {key: sum(d[key] for d in documents) for key in ("tokens", "windows")}
    total |= {"mean_p": _mean(documents, "mean_p"), "max_p": max(d["max_p"] for d in documents)}
    total["over"] = {t: sum(d["over"].get(t, 0) for d in documents) for t in {t for d in documents for t in d["over"]}}
    if compared:
        bases = _bases(documents)
        total["base"] = {"mean_p": _mean(bases, "mean_p"), "max_p": max(base["max_p"] for base in bases)}
    return total


def _loss_table(groups: list[tuple[str, list[Row]]], greedy: int, unit: str) -> Table:
    """Return the table of greedy decoding and loss; without greedy decoding, of the loss only."""
    columns = [
        Column("equal", over=f"greedy {greedy}", hint=f"share of {unit}s equal to the text"),
        Column("exact", over=f"greedy {greedy}", hint="continuations that equal the text completely"),
        Column(f"{unit}s", over="longest verbatim run"),
        Column("text", text=True, over="longest verbatim run"),
        Column("nats", over="loss", hint=f"nats per {unit}"),
        Column("bits/byte", over="loss"),
    ]

    def row(d: Row) -> list[Cell]:
        share = d["greedy"]["share"]
        return [
            Cell("-" if share is None else percent(share), share),
            Cell(f"{d['greedy']['exact']:,} of {d['greedy']['starts']:,}", d["greedy"]["exact"]),
            count_cell(d["longest_run"]["tokens"]),
            Cell(shorten(d["longest_run"]["text"], 80)),
            *(Cell(f"{d[key]:.3f}".replace("nan", "-"), d[key]) for key in ("nats_per_token", "bits_per_byte")),
        ]

    first = 0 if greedy else 4
    return _by_document(groups, columns[first:], lambda d: row(d)[first:])


def _by_document(
    groups: list[tuple[str, list[Row]]], columns: Sequence[Column], row: Callable[[Row], list[Cell]]
) -> Table:
    """Return a table with a row for each document of some groups."""
    by_group = [Group([[Cell(d["name"]), *row(d)] for d in ds], heading) for heading, ds in groups]
    return Table([Column("Document", text=True), *columns], groups=by_group)


def _series(
    documents: list[Row], colors: dict[str, str], x: list[list[float]], y: list[list[float]], *, dots: bool
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


def _thresholds(trained: list[Row], controls: list[Row], colors: dict[str, str]) -> list[Block]:
    """Return charts of the windows over each threshold and of the strongest window of each document."""
    documents = trained + controls
    if not documents:
        return []
    x = [sorted(map(float, d["over"])) for d in documents]
    y = [[100 * d["over"][t] / max(d["windows"], 1) for t in sorted(d["over"], key=float)] for d in documents]
    chart = Chart(
        "Share of the windows with at least this P(z)",
        "% of windows",
        _series(documents, colors, x, y, dots=True),
        x_label="P(z)",
        x_scale="log",
        x_ticks=[(t, percent(t)) for t in sorted({t for ts in x for t in ts})],
        y_low=0,
        y_high=1,
        size=(960, 300),
    )
    drawn = sorted(trained, key=lambda d: -d["max_p"])[:_MAX_BARS] + controls[:_MAX_BARS]
    shades = ["ctl" if d["control"] else colors.get(d["name"], "c0") for d in drawn]
    bars = [
        Bar(d["name"], max(d["max_p"], 1e-300), percent(d["max_p"]), shade)
        for d, shade in zip(drawn, shades, strict=True)
    ]
    title = "The strongest window of each document: largest P(z)"
    blocks: list[Block] = [chart, BarChart(title, bars, low=1e-12, high=1, scale="log")]
    hidden = len(documents) - len(drawn)
    return (
        [*blocks, Paragraph(f"The {hidden:,} documents not drawn are in the table.", soft=True)] if hidden else blocks
    )


def _over_training(checkpoints: list[dict[str, Any]], colors: dict[str, str], unit: str) -> list[Block]:
    """Return curves per document over the checkpoints of the run."""
    if not checkpoints:
        return []
    checkpoints = sorted(checkpoints, key=lambda c: c["step"])
    documents = list({d["name"]: d for c in checkpoints for d in c["documents"]}.values())
    by_name = [{d["name"]: d for d in c["documents"]} for c in checkpoints]
    x: list[list[float]] = [[c["step"] for c in checkpoints]] * len(documents)

    def chart(key: str, factor: float, title: str, y_label: str, **options: Any) -> Chart:
        y = [[factor * at[d["name"]][key] if d["name"] in at else math.nan for at in by_name] for d in documents]
        lines = _series(documents, colors, x, y, dots=len(checkpoints) <= 40)
        return Chart(title, y_label, lines, x_label="step", **options)

    charts = [
        chart("memorized", 100, "Memorized: P(z) of 50% or more", "% of windows", y_low=0, y_high=1),
        chart("mean_log_p", 1 / _LN10, "P(z), geometric mean", "P(z)", y_scale="exponent", y_high=0),
        chart("mean_p", 100, "P(z), mean", "P(z) in %", y_low=0, y_high=1),
        chart("nats_per_token", 1, "Loss", f"nats per {unit}", y_low=0),
    ]
    return [Charts(charts, key=True)]


def _discoverable(groups: list[tuple[str, list[Row]]]) -> list[Block]:
    """Return tables of the (n, p)-discoverable windows: in n samples, with probability p."""
    documents = [d for _, ds in groups for d in ds]
    samples = sorted({n for d in documents for n in d["discoverable"]}, key=int)
    chances = sorted({p for d in documents for n in d["discoverable"].values() for p in n}, key=float)
    if not samples:
        return []
    columns = [Column("n samples")]
    rows = [[count_cell(int(n))] for n in samples]
    for _, ds in groups:
        kind, windows = "control" if ds[0]["control"] else "trained", max(sum(d["windows"] for d in ds), 1)
        for p in chances:
            over = f"{kind}: windows that turn up with probability p"
            columns.append(Column(f"p ≥ {percent(float(p))}", over=over))
            for n, row in zip(samples, rows, strict=True):
                number = sum(d["discoverable"][n][p] for d in ds)
                row.append(Cell(f"{number:,}", number, small=percent(number / windows)))
    middle = chances[len(chances) // 2]
    by_samples = [Column(f"n = {int(n):,}") for n in samples]
    per_document = _by_document(
        groups, by_samples, lambda d: [count_cell(d["discoverable"][n][middle]) for n in samples]
    )
    about = (
        "Sampling often enough finds more than the likeliest passages. A window counts if, with probability p or more, "
        "one of n samples (temperature 1, after the true prompt) is the true suffix."
    )
    folded = Details(f"Each document, p ≥ {percent(float(middle))}", [per_document])
    return [Paragraph(about), Table(columns, rows), folded]


def _passages(report: dict[str, Any]) -> list[Block]:
    """Return the strongest passages, with where they come from."""
    passages, audit, unit = report["passages"], report.get("audit"), report["unit"]
    if not passages:
        return []
    recited_from = audit["threshold"] if audit else float(_MEMORIZED)
    blocks: list[Block] = [Paragraph("The prompt is grey; the true suffix follows in the color of P(z)."), HeatKey()]
    for rank, p in enumerate(passages[:_MAX_PASSAGES], 1):
        base = f", base {percent(p['base_p'])}" if "base_p" in p else ""
        base += ", already known to the base" if p.get("base_p", -1.0) >= recited_from else ""
        where = passage_origin(p, unit) if audit else p["document"]
        where += " (control)" if p["control"] else ""
        where += "" if audit else f", {p['start']:,} to {p['end']:,}"
        where += f"; also in {first_few(p['also_in'])}" if p["also_in"] else ""
        heading = [("", f"{rank}. "), ("b", percent(p["p"])), ("", f", {one_in(p['log_p'])}{base} "), ("soft", where)]
        blocks.append(Passage(heading, HeatText(p["suffix"], [p["p"]] * len(p["suffix"]), p["prompt"])))
    return [*blocks, *_more_in_json(len(passages) - _MAX_PASSAGES)]


def _more_in_json(number: int) -> list[Block]:
    return [Paragraph(f"{number:,} more are in the JSON file.", soft=True)] if number > 0 else []


def _strips(strips: list[dict[str, Any]], *, by_suffix: bool) -> list[Block]:
    """Return the strips that fit the page (at least one); the first short one is open."""
    sizes = itertools.accumulate(len(strip["text"]) for strip in strips)
    shown = [
        strip for i, (strip, size) in enumerate(zip(strips, sizes, strict=True)) if not i or size <= _MAX_CHARACTERS
    ]
    if not shown:
        return []
    opened = next((strip for strip in shown if len(strip["text"]) <= _OPEN_CHARACTERS), None)
    cover = "whose suffix covers it" if by_suffix else "that cover it"
    about = f"Each character has the color of the largest P(z) among the windows {cover}; hover to see the value."
    blocks: list[Block] = [Paragraph(about), HeatKey()]
    for strip in shown:
        text, p = strip["text"], strip["p"]
        size = f"{'control, ' if strip['control'] else ''}{len(text):,} characters"
        summary = [("b", strip["document"]), ("", " "), ("soft", size)]
        blocks.append(Details(summary, [HeatText(text, p)], open=strip is opened, bar=p))
    return [*blocks, *_more_in_json(len(strips) - len(shown))]


def _positions(report: dict[str, Any], colors: dict[str, str]) -> list[Block]:
    """Return the chart of P(z) over the offset in the frame, for learned positions."""
    if report["position_map"]:
        documents, offsets = report["position_map"]["documents"], report["position_map"]["offsets"]
        x = [list(map(float, offsets))] * len(documents)
        y = [[value / _LN10 for value in d["mean_log_p"]] for d in documents]
        chart = Chart(
            "P(z) by offset in the frame, geometric mean over the windows",
            "P(z)",
            _series(documents, colors, x, y, dots=len(offsets) <= 40),
            x_label=f"{report['unit']}s before the text",
            y_scale="exponent",
            y_high=0,
            size=(960, 300),
        )
        about = "Positions are learned, so a model may know a text at one offset in the frame and not at another."
        return [Paragraph(about), chart]
    if report["positions"] != "rope":
        return []
    about = (
        "With rotary positions and a segment mask, attention depends only on distances within the text: P(z) does not "
        "depend on the offset in the frame. A map over offsets would be flat, so none is drawn."
    )
    return [Paragraph(about)]
