"""The report of a run: what it was trained on and how, its curves, scores, samples, speed and memorization.

Everything is read from the folder of the run. What a run of an older version did not record is "not recorded".
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import dump_config, load_config
from niels_gpt.data.note_record import kept_notes
from niels_gpt.data.note_selection import Skipped
from niels_gpt.data.registry import YOURS
from niels_gpt.evaluation.baselines import PRIMED, reference_bits, reference_notes, references
from niels_gpt.memorization.audit import LAST_AUDIT, counts_text, passage_origin, verdict_lines
from niels_gpt.report.charts import Chart, Series
from niels_gpt.report.curves import EACH_STEP, SMOOTHED, loss_chart
from niels_gpt.report.document import (
    Block,
    Cell,
    Charts,
    Column,
    Details,
    Document,
    Facts,
    Lead,
    Paragraph,
    Section,
    Table,
    Text,
    count_cell,
)
from niels_gpt.report.memorization_report import headline
from niels_gpt.report.numbers import percent, short, shorten
from niels_gpt.runs.catalog import value_text
from niels_gpt.runs.environment import DIVERGED, FAILED
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import RunInfo, stored_scores
from niels_gpt.runs.pipeline import pipeline_of
from niels_gpt.runs.source import SECTIONS, source_text
from niels_gpt.system import files
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.console import error_message, format_duration, one_line, optional_write, plural, short_number
from niels_gpt.system.json_text import parse_json
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.training.progress import SETTLING_STEPS
from niels_gpt.training.score_run import Scores, held_out_references

NOT_RECORDED = "not recorded"
MOST_POINTS = 400
"""Points of a curve; of more steps, the extremes are drawn."""
MOST_SAMPLES = 12
SAMPLE_CHARACTERS = 1500
REFERENCES_FILE = "references.json"
"""What xz, zstd and a unigram model reach on the held-out text of a run."""
REFERENCE_LIMIT = 2_000_000
"""Bytes or tokens of a held-out set that are compressed for comparison, unless `eval` has compressed all."""


def read_facts(path: Path) -> RunInfo:
    """Read a run. Raises ValueError, with the reason, if its config cannot be read.

    What this process writes from now on is as private as the files of the run.
    """
    run = RunFolder(path)
    keep_private((path, run.config_path, run.metrics_path, run.samples, *files.matching(run.samples, "*.txt")))
    facts = RunInfo(path)
    if facts.detail["state"] == "damaged":
        raise ValueError(f"{path} has no report: {facts.detail['problem']}")
    return facts


def run_report(facts: RunInfo, *, memorization: Sequence[Path] = ()) -> Document:
    """Return the report of a run. memorization: folders of reports of `memorize` and `audit` outside the run."""
    subtitle = f"Report of {files.display_path(facts.path)}, {_today()}"
    return Document(facts.path.resolve().name, subtitle, _sections(facts, memorization))


def pipeline_report(folder: Path, phases: Sequence[RunInfo], *, memorization: Sequence[Path] = ()) -> Document:
    """Return the reports of the runs of a pipeline as one document."""
    sections = []
    for facts in phases:
        first, *rest = _sections(facts, memorization)
        sections += [replace(first, heading=facts.path.name), *(replace(section, level=3) for section in rest)]
    subtitle = f"Report of the pipeline {files.display_path(folder)}, {_today()}"
    return Document(folder.resolve().name, subtitle, sections)


def _today() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M")


def _sections(facts: RunInfo, memorization: Sequence[Path]) -> list[Section]:
    config = load_config(facts.path / "config.yaml")
    if facts.detail["state"] == "imported":  # it has no steps and no data
        return [
            Section("Result", _result(facts)),
            Section("Memorization", _memorization(facts, memorization)),
            Section("Config", _config(facts, config)),
        ]
    return [
        Section("Result", _result(facts)),
        Section("Curves", _curves(facts)),
        Section("Loss per source", _losses(facts, config)),
        Section("Data", _data(facts)),
        Section("Samples over time", _samples(facts)),
        Section("Speed and hardware", _speed(facts, config)),
        Section("Memorization", _memorization(facts, memorization)),
        Section("Config", _config(facts, config)),
        Section("Reproduce", _reproduce(facts)),
        Section("Environment", _environment(facts)),
    ]


# --- result ------------------------------------------------------------------------------------------


def _result(facts: RunInfo) -> list[Block]:
    detail = facts.detail
    lines = ["An imported model: no step was trained here."]
    if detail["steps"] is not None:
        lines = [f"{_sentence(facts.outcome)}: {detail['steps']:,} of {plural(detail['total_steps'], 'step')}."]
    last = facts.last_session
    if last is not None and facts.outcome in (DIVERGED, FAILED):
        lines.append(f"{_sentence(last.reason)}.")
    if detail["best_loss"] is not None:
        bits = "" if detail["bits_per_byte"] is None else f", {detail['bits_per_byte']:.3f} bits per byte"
        lines.append(
            f"Best validation loss {detail['best_loss']:.4f} nats per {facts.unit} after "
            f"{plural(detail['best_step'], 'step')}{bits}."
        )
    elif not facts.lines and detail["steps"] is not None:
        lines.append("No step is recorded yet.")
    elif facts.lines:
        lines.append("No evaluation is recorded yet.")
    rows = [
        *([("Imported from", source_text(detail["source"]))] if detail["source"] else []),
        *([("Task", detail["task"])] if detail["task"] is not None else []),
        ("Parameters", f"{detail['parameters']:,}"),
        ("Context", f"{detail['context']:,} {facts.unit}s"),
        ("Vocabulary", f"{detail['vocabulary']:,}"),
        ("Last changed", datetime.fromtimestamp(detail["changed"]).strftime("%Y-%m-%d %H:%M")),
        ("On disk", "?" if detail["disk"] is None else f"{short_number(detail['disk'])}B"),
    ]
    if facts.lines:
        rows.insert(-2, ("Last training loss", f"{facts.lines[-1]['loss']:.4f}"))
    return [Lead(lines), Facts(rows)]


def _sentence(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


# --- curves ------------------------------------------------------------------------------------------


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` points of a line: of each stretch of equal length its lowest and highest point."""
    if len(x) <= most:
        return list(x), list(y)
    values = np.asarray(y, dtype=np.float64)
    edges = np.linspace(0, len(x), most // 2 + 1).astype(int)
    kept = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[start:end]
        known = ~np.isnan(part)
        extremes = (np.where(known, part, np.inf).argmin(), np.where(known, part, -np.inf).argmax())
        kept += sorted({start + int(index) for index in extremes})
    return [x[i] for i in kept], [y[i] for i in kept]


def _loss_chart(facts: RunInfo, lines: Sequence[dict[str, Any]]) -> Chart:
    """Return the chart of the losses; steps are counted from 1."""
    chart = loss_chart(lines, "Loss", f"nats per {facts.unit}")
    labels = {EACH_STEP: "", SMOOTHED: "training, smoothed"}
    series = []
    for line in chart.series:
        x, y = thinned([step + 1 for step in line.x], [v if v <= chart.y_most else math.nan for v in line.y])
        series.append(replace(line, x=x, y=y, label=labels.get(line.name, line.name)))
    return replace(chart, series=series, x_whole=True)


def _curves(facts: RunInfo) -> list[Block]:
    lines = [m for m in facts.lines if "loss" in m]
    if not lines:
        return [Paragraph("No step is recorded yet.")]
    charts = [_loss_chart(facts, lines)]
    options: dict[str, Any]
    for key, title, label, options in (
        ("lr", "Learning rate", "", {"y_low": 0}),
        ("grad_norm", "Gradient norm", "before clipping", {"y_scale": "log"}),
        ("tokens_per_s", "Speed", f"{facts.unit}s per second", {"y_low": 0}),
    ):
        series = metric_series(facts, key, label=title.lower())
        if series is not None:
            charts.append(Chart(title, label, [series], key=False, x_whole=True, **options))
    return [Charts(charts)]


def metric_series(facts: RunInfo, key: str, *, label: str, color: str = "c0", style: str = "") -> Series | None:
    """Return a value of each step as a line; None if the run did not record it."""
    points = [(m["step"] + 1, m[key]) for m in facts.lines if key in m]
    if not points:
        return None
    x, y = thinned([step for step, _ in points], [value for _, value in points])
    return Series(label, x, y, color=color, label=label, style=style)


# --- losses ------------------------------------------------------------------------------------------


def _losses(facts: RunInfo, config: RunConfig) -> list[Block]:
    """Return the loss of each held-out set in bits per byte, beside what needs no model; of chats in nats only."""
    best = facts.detail["best_step"]
    if best is None:
        return [Paragraph("No evaluation is recorded yet.")]
    measure = command("eval", facts.path)
    scores = stored_scores(facts.path, best)
    if scores:
        note = f"All held-out text, scored by eval after {plural(best, 'step')}. Lower is better."
        return [score_table(scores), Paragraph(note, soft=True), *_reference_notes(scores)]
    evals = next(m["evals"] for m in facts.lines if m["step"] + 1 == best)
    sampled = {name: loss for name, loss in evals.items() if "/" not in name}
    compared, problem = dict[str, Any](), ""
    if config.task in ("bytes", "pretrain"):
        try:
            compared = _references(facts, config)
        except (ValueError, OSError) as err:
            problem = f"compressors and unigram are missing: {one_line(error_message(err))}"
    more = f"{measure} scores all held-out text."
    if not compared and facts.unit != "byte":  # the bytes of its tokens are not known
        nats = [[Cell(name), Cell(f"{loss:.3f}", loss)] for name, loss in sampled.items()]
        table = Table([Column("Held out", text=True), Column("nats", hint="per token")], nats)
        note = f"Sampled at the best step, {best:,}; nats per token, lower is better. {more}"
        return [table, *(Paragraph(text, soft=True) for text in (note, problem) if text)]
    rows = {}
    for name in dict.fromkeys([*sampled, *compared]):
        rows[name] = dict(compared.get(name, {"uniform_bits": 8.0}))
        if name in sampled:
            ratio = rows[name]["tokens"] / rows[name]["bytes"] if name in compared else float(facts.unit == "byte")
            rows[name] |= {
                "nats_per_token": sampled[name],
                "bits_per_byte": sampled[name] / math.log(2) * ratio or math.nan,
            }
    note = f"Sampled at the best step, {best:,}; bits per byte, lower is better. {more}"
    blocks: list[Block] = [score_table(rows), Paragraph(note, soft=True), *_reference_notes(rows)]
    return [*blocks, Paragraph(problem, soft=True)] if problem else blocks


def _references(facts: RunInfo, config: RunConfig) -> Scores:
    """Return `held_out_references`; what takes seconds is stored with the run, for the same texts."""
    path, stored, compared = facts.path / REFERENCES_FILE, dict[str, Any](), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError):
        stored = read_checked_json(path)

    def compare(stream: bytes, *, train: bytes, whole: bool = True) -> dict[str, Any]:
        key = f"{files.sha256_bytes(stream)} {files.sha256_bytes(train)} {whole}"
        compared[key] = stored.get(key) or references(stream, train=train, whole=whole)
        return dict(compared[key])

    trained_on = facts.environment.fingerprint if facts.environment else None
    found = held_out_references(config, trained_on, limit=REFERENCE_LIMIT, compare=compare)
    if compared != stored:
        with optional_write(path):
            write_checked_json(path, compared)
    return found


def score_table(scores: Scores) -> Table:
    """Return the scores of held-out sets, in bits per byte beside what needs no model."""

    def bits(value: float | None) -> Cell:
        return Cell("", None) if value is None or math.isnan(value) else Cell(f"{value:.3f}", value)

    columns = [Column("Held out", text=True), Column("bytes"), Column("nats", hint="per byte or token")]
    compared = {name: reference_bits(score) for name, score in scores.items()}
    titles = list(dict.fromkeys(title for found in compared.values() for title in found))
    columns += [Column(name, over="bits per byte") for name in ("model", *titles)]
    rows = []
    for name, score in scores.items():
        size = score.get("bytes")
        cells = [Cell(name), Cell("") if size is None else count_cell(int(size)), bits(score.get("nats_per_token"))]
        cells += [bits(score.get("bits_per_byte")), *(bits(compared[name].get(title)) for title in titles)]
        rows.append(cells)
    return Table(columns, rows)


def _reference_notes(scores: Scores) -> list[Block]:
    notes = [note for name, score in scores.items() for note in reference_notes(name, score)]
    primed = [PRIMED] if any(score.get("baselines") for score in scores.values()) else []
    return [Paragraph(text, soft=True) for text in (*primed, *notes)]


# --- data --------------------------------------------------------------------------------------------


def _data(facts: RunInfo) -> list[Block]:
    return [*data_blocks(facts), *_skipped(facts), *_kept(facts)]


def data_blocks(facts: RunInfo, *, paths: bool = True) -> list[Block]:
    """Return the sources with counts and licences; `paths`: and with the paths they were read from.

    Without paths it is for strangers, to whom the user's own text is the author's.
    """
    blocks: list[Block] = []
    if facts.environment and facts.environment.data:
        columns = [Column("Source", text=True), Column("share"), Column("train"), Column("held out")]
        columns += [Column("documents"), Column("Licence", text=True), Column("From", text=True)]
        rows = []
        for row in facts.environment.data:
            sizes = [Cell(f"{short_number(row[k])}{row['unit']}", row[k]) for k in ("train", "held_out")]
            where = re.sub(r" \((cached|built)\)$", "", row["path"])
            cells = [Cell(row["source"]), Cell(f"{row['share']:.1%}", row["share"]), *sizes]
            licence = row.get("licence") or "unknown"
            if not paths:
                licence = re.sub(rf"\b{YOURS}\b", "the author's own", licence)
            rows.append([*cells, count_cell(row["documents"]), Cell(licence), Cell(files.display_path(where))])
        if not paths:
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        blocks.append(Table(columns, rows))
    else:
        lines = [*(facts.detail["data"] if paths else ()), f"Counts and licences: {NOT_RECORDED}"]
        blocks += [Paragraph(line) for line in lines]
    return blocks


def _skipped(facts: RunInfo) -> list[Block]:
    """Return how many files were not read, by reason. Their names are private, so they stay in skipped.json."""
    path = RunFolder(facts.path).skipped_path
    if not path.exists():  # the notes were read when their cache was built
        path = _folder_of_notes(facts) / path.name
    try:
        stored = parse_json(path.read_bytes())
        lines = []
        for source, record in stored.items():
            counts: Counter[str] = Counter()
            for entry in record["skipped"]:
                skipped = Skipped(entry["path"], entry["reason"], entry["files"])
                counts[skipped.kind] += skipped.files
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.most_common()) or "nothing"
            lines.append(f"{source}: {plural(record['notes'], 'file')} read; skipped {reasons}.")
    except FileNotFoundError:
        return [Paragraph("Skipped files: none recorded.", soft=True)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return [Paragraph(f"Skipped files: {path.name} cannot be read.", soft=True)]
    return [*map(Paragraph, lines), Paragraph(f"{path.name} has the names.", soft=True)]


def _kept(facts: RunInfo) -> list[Block]:
    """Return how many notes it was trained on although they were removed before it was resumed, by reason."""
    try:
        kept = kept_notes(_folder_of_notes(facts))
    except ValueError as err:
        return [Paragraph(str(err), soft=True)]
    counts = Counter(Skipped("", reason).kind for reason in kept.values())
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.most_common())
    return [Paragraph(f"Trained on although removed since (--allow-data-change): {reasons}.")] if kept else []


def _folder_of_notes(facts: RunInfo) -> Path:
    """The folder that records which notes were read: the run, or its caches."""
    if facts.detail["task"] == "bytes":
        return facts.path
    return files.expand_home(load_config(facts.path / "config.yaml").data.token_cache)


# --- samples -----------------------------------------------------------------------------------------


def _samples(facts: RunInfo) -> list[Block]:
    """Return samples of steps that are evenly spread over the run, the last one open."""
    found = files.matching(RunFolder(facts.path).samples, "step_*.txt")
    if not found:
        return [Paragraph("No sample is written yet.")]
    number = min(MOST_SAMPLES, len(found))
    shown = [found[i * (len(found) - 1) // max(number - 1, 1)] for i in range(number)]
    blocks: list[Block] = []
    for path in shown:
        step = int(path.stem.removeprefix("step_") or 0) if path.stem[5:].isdigit() else 0
        try:
            text = path.read_bytes().decode("utf-8", errors="replace").rstrip("\n")
        except OSError as err:
            text = f"({error_message(err)})"
        cut = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]}…"
        blocks.append(Details(f"After {plural(step, 'step')}: {shorten(text, 60)}", [Text(cut)], path == shown[-1]))
    if len(found) > number:
        blocks.append(Paragraph(f"{number} of {plural(len(found), 'sample')}; all are in samples/.", soft=True))
    return blocks


# --- speed -------------------------------------------------------------------------------------------


def speed(facts: RunInfo) -> float | None:
    """Return the median of tokens per second, without the first steps after each start."""
    starts = {session.step for session in facts.environment.sessions} if facts.environment else {0}
    settling = {start + i for start in starts for i in range(SETTLING_STEPS)}
    rates = [m["tokens_per_s"] for m in facts.lines if "tokens_per_s" in m]
    settled = [m["tokens_per_s"] for m in facts.lines if "tokens_per_s" in m and m["step"] not in settling]
    return statistics.median(settled or rates) if rates else None


def training_time(facts: RunInfo) -> float | None:
    """Return the seconds of all sessions that have an end; None if they are not recorded."""
    sessions = facts.environment.sessions if facts.environment else []
    ends = [(s.started, s.ended) for s in sessions if s.ended]
    return (
        sum((datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds() for a, b in ends) if ends else None
    )


def _speed(facts: RunInfo, config: RunConfig) -> list[Block]:
    rate, seconds = speed(facts), training_time(facts)
    last = facts.last_session
    machine = last.machine if last else {}
    processes = last.processes if last and machine else None
    rows = [
        ("Speed", NOT_RECORDED if rate is None else f"{short_number(rate)} {facts.unit}s per second (median)"),
        ("Batch", f"{config.train.B:,} rows of {config.model.T:,} {facts.unit}s"),
        ("Precision", config.train.precision),
        ("Time", NOT_RECORDED if seconds is None else f"{format_duration(seconds)}, with evaluations"),
        ("Device", str(machine.get("device", NOT_RECORDED))),
        ("Hardware", "; ".join(machine.get("devices", [])) or NOT_RECORDED),
        ("Threads", f"{machine['threads']} of {machine['cores']} cores" if "threads" in machine else NOT_RECORDED),
        ("Processes", NOT_RECORDED if processes is None else str(processes)),
    ]
    for key, name, text in (("mfu", "MFU", percent), ("stall", "GPU idle", percent)):
        values = [m[key] for m in facts.lines if isinstance(m.get(key), int | float)]
        if values:
            rows.append((name, f"{text(statistics.median(values))} (median)"))
    memory = [m["memory_gib"] for m in facts.lines if isinstance(m.get("memory_gib"), int | float)]
    if memory:
        rows.append(("GPU memory", f"{max(memory):.1f} GiB at most"))
    return [Facts(rows)]


# --- memorization ------------------------------------------------------------------------------------


def _memorization(facts: RunInfo, others: Sequence[Path]) -> list[Block]:
    """Return the results of the reports of `memorize` and `audit` in the run and in other folders, without texts."""
    pipeline = pipeline_of(facts.path)
    inside = [path for folder in (facts.path, pipeline) if folder for path in sorted(folder.iterdir()) if path.is_dir()]
    blocks: list[Block] = []
    audited = False
    for folder in dict.fromkeys([*inside, *others]):
        found: list[Block] = []
        for name, summary in (("audit.json", _audit_blocks), ("report.json", _report_blocks)):
            path = folder / name
            if not path.is_file():
                continue
            keep_private([path])
            try:
                found += summary(parse_json(path.read_bytes()), facts)
                audited = audited or (bool(found) and name == "audit.json")
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                if folder in others or name == "audit.json":
                    found.append(Lead([f"{name} cannot be read."]))
        if found:
            blocks += [Paragraph(f"{files.display_path(folder)}:", soft=True), *found]
    if not audited:  # settings that do not count for an export
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            blocks += _audit_blocks(parse_json((facts.path / LAST_AUDIT).read_bytes()), facts)
    if blocks:
        return blocks
    memorize, audit = (
        command("research", "memorize", facts.path),
        command("audit", facts.path, "--out", facts.path / "audit"),
    )
    if facts.detail["state"] == "imported":
        audit = command("audit", facts.path, "--notes", "FOLDER", "--out", facts.path / "audit")
        return [Paragraph(f"Not measured. {audit} measures what it knows of notes that it was not trained on here.")]
    return [Paragraph(f"Not measured. {memorize} measures training documents, {audit} all notes.")]


def _audit_blocks(verdict: dict[str, Any], facts: RunInfo) -> list[Block]:
    """Return the verdict of an audit and its passages: where they come from, without their text."""
    if not _is_of(verdict["checkpoint"], facts):
        return []
    compared = verdict.get("base") and verdict["windows_over"]
    known = f" The base already knew {verdict['windows_known']:,} of them." if compared else ""
    so_far = " The audit was interrupted." if verdict.get("interrupted") else ""
    heading = f"Audit after {plural(verdict['step'], 'step')}: {_sentence(counts_text(verdict))}.{known}{so_far}"
    blocks: list[Block] = [Lead([*verdict_lines(verdict), heading])]
    limit = verdict["threshold"]
    rows = [
        [Cell(short(p["p"]), p["p"]), Cell(passage_origin(p, verdict["unit"]))]
        for p in verdict.get("passages", ())
        if p["p"] >= limit
    ]
    if rows:
        blocks.append(Table([Column("P(z)"), Column("Passage", text=True)], rows))
    secrets = [
        [Cell(f"{s['path']}:{s['line']}"), Cell(s["kind"]), Cell(short(s["p"]), s["p"])]
        for s in verdict.get("secrets", ())
        if s["recited"]
    ]
    if secrets:
        blocks.append(Table([Column("Recited secret", text=True), Column("Kind", text=True), Column("P(z)")], secrets))
    return blocks


def _report_blocks(report: dict[str, Any], facts: RunInfo) -> list[Block]:
    """Return the headline of a report of `memorize`; that of an audit is in its audit.json."""
    if "audit" in report or not _is_of(report["checkpoint"], facts):
        return []
    settings = report["settings"]
    measured = f"windows of {settings['window']} {report['unit']}s, {settings['prompt']} of them given"
    return [Lead([f"Measured after {plural(report['step'], 'step')}: {measured}.", *headline(report)])]


def _is_of(checkpoint: str, facts: RunInfo) -> bool:
    """Whether a checkpoint is in a run: by the end of its path, since the folder may have moved."""
    return Path(checkpoint).parent.parent.name == facts.path.resolve().name


# --- config, commands, environment -------------------------------------------------------------------


def _config(facts: RunInfo, config: RunConfig) -> list[Block]:
    rows = [
        [Cell(key), Cell(value_text(new)), Cell(value_text(old))]
        for key, (old, new) in facts.detail["differences"].items()
    ]
    columns = [Column("Key", text=True), Column("Value", text=True), Column("Default", text=True)]
    changed: Block = Table(columns, rows) if rows else Paragraph("All values are the defaults.")
    sections = SECTIONS if facts.detail["state"] == "imported" else ()
    return [changed, Details("config.yaml, every key", [Text(dump_config(config, sections=sections))])]


def reproduce_command(facts: RunInfo) -> str:
    """Return what to type to train the run again, from its config.yaml, which has every value that was used."""
    again = facts.path.with_name(f"{facts.path.resolve().name}-again")
    words: list[str | Path] = ["train", "--config", facts.path / "config.yaml", "--run-dir", again]
    last = facts.last_session
    machine = last.machine if last else {}
    words += ["--device", str(machine["device"])] if "device" in machine else []
    if last and last.processes > 1:
        ranks = f"torchrun --nproc-per-node {last.processes} -m niels_gpt"
        return " ".join([ranks, *(shlex.quote(str(word)) for word in words)])
    words += ["--threads", str(machine["threads"])] if machine.get("device") == "cpu" else []
    return command(*words)


def _reproduce(facts: RunInfo) -> list[Block]:
    blocks: list[Block] = [Text(reproduce_command(facts))]
    note = (
        "The config has every value, so this command repeats all steps, also those of a run that was extended. On a "
        "CPU the result is bit for bit the same with the versions below and the same kind of processor; on a GPU, if "
        "engine.deterministic was set."
    )
    blocks.append(Paragraph(note, soft=True))
    if not facts.environment:
        return [*blocks, Paragraph(f"The commands that were typed: {NOT_RECORDED}.")]
    rows, running = [], "running" if facts.detail["state"] == "training" else "killed"
    for session in facts.environment.sessions:
        last = f"{session.steps:,}" if session.steps is not None else "?"
        rows.append(
            [
                Cell(session.started.replace("T", " ").removesuffix("+00:00")),
                Cell(f"{session.step:,} to {last}", session.step),
                Cell(session.outcome or (running if session is facts.environment.sessions[-1] else "killed")),
                Cell(session.command or "niels_gpt.train(), from Python", small=f"in {session.folder}"),
            ]
        )
    columns = [Column("Started (UTC)", text=True), Column("steps"), Column("Ended", text=True)]
    return [*blocks, Table([*columns, Column("Command", text=True)], rows)]


VERSIONS = {"niels_gpt": "niels-gpt", "python": "Python", "system": "System", "torch": "torch", "cuda": "CUDA"}
"""Keys of `machine_facts` and their names in a report."""


def _environment(facts: RunInfo) -> list[Block]:
    if not facts.environment or not facts.environment.sessions:
        return [Paragraph(f"Versions: {NOT_RECORDED}.")]
    machines = [session.machine for session in facts.environment.sessions]
    rows = []
    for key, name in {**VERSIONS, "triton": "Triton"}.items():
        values = dict.fromkeys(str(machine.get(key) or "none") for machine in machines)
        rows.append((name, ", then ".join(values)))
    return [Facts(rows)]


def final_metrics(facts: RunInfo) -> dict[str, str]:
    """Return the results of a run by name, for a comparison."""
    detail, rate, seconds = facts.detail, speed(facts), training_time(facts)
    found = {
        "state": facts.outcome,
        "task": detail["task"] or "",
        "parameters": f"{detail['parameters']:,}",
        "steps": "" if detail["steps"] is None else f"{detail['steps']:,} of {detail['total_steps']:,}",
        "best validation loss": "" if detail["best_loss"] is None else f"{detail['best_loss']:.4f}",
        "after steps": "" if detail["best_step"] is None else f"{detail['best_step']:,}",
        "bits per byte": "" if detail["bits_per_byte"] is None else f"{detail['bits_per_byte']:.4f}",
        "last training loss": f"{facts.lines[-1]['loss']:.4f}" if facts.lines else "",
        "per second": "" if rate is None else f"{short_number(rate)} {facts.unit}s",
        "time": NOT_RECORDED if seconds is None else format_duration(seconds),
    }
    return found | {f"last {name}": short(value) for name, value in detail["last_evals"].items()}
