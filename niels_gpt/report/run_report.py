"""The report of a run: what it was trained on and how, its curves, scores, samples, speed and memorization.

Everything is read from the folder of the run. What a run of an older version did not record is "not recorded".
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import dump_config, load_config
from niels_gpt.data.note_selection import Skipped
from niels_gpt.data.registry import YOURS
from niels_gpt.memorization.audit import counts_text
from niels_gpt.report.charts import Series
from niels_gpt.report.curves import EACH_STEP, SMOOTHED, loss_curves, loss_limits
from niels_gpt.report.document import (
    Block,
    Chart,
    Charts,
    Details,
    Document,
    Facts,
    Lead,
    Paragraph,
    Section,
    Table,
    Text,
)
from niels_gpt.report.html import COLORS, Cell, Column, count_cell
from niels_gpt.report.memorization_page import headline
from niels_gpt.report.numbers import percent, short, shorten
from niels_gpt.runs.catalog import pipeline_of, read_tree, stored_scores
from niels_gpt.runs.describe import describe, value_text
from niels_gpt.runs.environment import DIVERGED, FAILED, STOPPED, Environment, read_environment
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.source import SECTIONS, source_text
from niels_gpt.runs.validation import is_over_bytes
from niels_gpt.system import files
from niels_gpt.system.console import error_message, format_duration, one_line, plural, short_number
from niels_gpt.system.json_text import parse_json
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command
from niels_gpt.training.progress import SETTLING_STEPS
from niels_gpt.training.score_run import held_out_references

NOT_RECORDED = "not recorded"
MOST_POINTS = 400
"""Points of a curve; of more steps, the extremes are drawn."""
MOST_SAMPLES = 12
SAMPLE_CHARACTERS = 1500
REFERENCE_LIMIT = 2_000_000
"""Bytes or tokens of a held-out set that are compressed for comparison, unless `eval` has compressed all."""
REFERENCES = ("xz", "gzip", "unigram", "uniform")


@dataclass(frozen=True)
class RunFacts:
    """What a report says of a run, read once."""

    path: Path
    detail: dict[str, Any]
    """`runs.describe.describe`."""
    tree: dict[str, Any]
    """Its config as a dict."""
    lines: list[dict[str, Any]]
    """metrics.jsonl."""
    environment: Environment | None

    @property
    def unit(self) -> str:
        """What its losses are per: "byte" or "token"."""
        return "byte" if is_over_bytes(self.tree) else "token"

    @property
    def state(self) -> str:
        """How the run is, or how it ended."""
        last = self.environment.sessions[-1] if self.environment and self.environment.sessions else None
        if self.detail["state"] != "stopped" or last is None:
            return str(self.detail["state"])
        if last.outcome is None:
            return "killed"
        if last.outcome == STOPPED:
            return f"stopped by {last.reason}"
        return last.outcome if last.outcome in (DIVERGED, FAILED) else "stopped"


def read_facts(path: Path) -> RunFacts:
    """Read a run. Raises ValueError, with the reason, if its config cannot be read.

    What this process writes from now on is as private as the files of the run.
    """
    run = RunFolder(path)
    keep_private((path, run.config_path, run.metrics_path, run.samples, *files.matching(run.samples, "*.txt")))
    detail = describe(path)
    if detail["state"] == "damaged":
        raise ValueError(f"{path} has no report: {detail['problem']}")
    return RunFacts(path, detail, read_tree(path), run.metrics(), read_environment(path))


def run_report(facts: RunFacts, *, memorization: Sequence[Path] = ()) -> Document:
    """Return the report of a run. memorization: folders of reports of `memorize` and `audit` outside the run."""
    subtitle = f"Report of {files.display_path(facts.path)}, {_today()}"
    return Document(facts.path.resolve().name, subtitle, _sections(facts, memorization))


def pipeline_report(folder: Path, phases: Sequence[RunFacts], *, memorization: Sequence[Path] = ()) -> Document:
    """Return the reports of the runs of a pipeline as one document."""
    sections = []
    for facts in phases:
        first, *rest = _sections(facts, memorization)
        sections += [replace(first, heading=facts.path.name), *(replace(section, level=3) for section in rest)]
    subtitle = f"Report of the pipeline {files.display_path(folder)}, {_today()}"
    return Document(folder.resolve().name, subtitle, sections)


def _today() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M")


def _sections(facts: RunFacts, memorization: Sequence[Path]) -> list[Section]:
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


def _result(facts: RunFacts) -> list[Block]:
    detail = facts.detail
    lines = ["An imported model: no step was trained here."]
    if detail["steps"] is not None:
        lines = [f"{_sentence(facts.state)}: {detail['steps']:,} of {plural(detail['total_steps'], 'step')}."]
    last = facts.environment.sessions[-1] if facts.environment and facts.environment.sessions else None
    if last is not None and facts.state in (DIVERGED, FAILED):
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


def loss_series(facts: RunFacts) -> list[Series]:
    """Return the lines of the loss chart, without the initial fall of a long run; steps are counted from 1."""
    lines = [m for m in facts.lines if "loss" in m]
    if not lines:
        return []
    curves = loss_curves(lines)
    highest = (loss_limits(curves) or (0.0, math.inf))[1]
    series = []
    for number, (name, steps, values) in enumerate(curves):
        x, y = thinned([step + 1 for step in steps], [v if v <= highest else math.nan for v in values])
        style = {EACH_STEP: ("ctl", "faint"), SMOOTHED: ("ctl", "")}.get(name) if number < 2 else None
        color, look = style or (f"c{(number - 2) % COLORS}", "dash" if number - 2 >= COLORS else "")
        label = "" if name == EACH_STEP else "training, smoothed" if number == 1 else name
        series.append(Series(name, x, y, color=color, label=label, style=look, dots=number > 1 and len(x) <= 60))
    return series


def _curves(facts: RunFacts) -> list[Block]:
    losses = loss_series(facts)
    if not losses:
        return [Paragraph("No step is recorded yet.")]
    charts = [Chart("Loss", f"nats per {facts.unit}", losses)]
    for key, title, label, options in (
        ("lr", "Learning rate", "", {"y_low": 0}),
        ("grad_norm", "Gradient norm", "before clipping", {"y_scale": "log"}),
        ("tokens_per_s", "Speed", f"{facts.unit}s per second", {"y_low": 0}),
    ):
        series = metric_series(facts, key, label=title.lower())
        if series is not None:
            charts.append(Chart(title, label, [series], options={**options, "key": False}))
    return [Charts(charts)]


def metric_series(facts: RunFacts, key: str, *, label: str, color: str = "c0", style: str = "") -> Series | None:
    """Return a value of each step as a line; None if the run did not record it."""
    points = [(m["step"] + 1, m[key]) for m in facts.lines if key in m]
    if not points:
        return None
    x, y = thinned([step for step, _ in points], [value for _, value in points])
    return Series(label, x, y, color=color, label=label, style=style)


# --- losses ------------------------------------------------------------------------------------------


def _losses(facts: RunFacts, config: RunConfig) -> list[Block]:
    """Return the loss of each held-out set in bits per byte, beside what needs no model; of chats in nats only."""
    best = facts.detail["best_step"]
    if best is None:
        return [Paragraph("No evaluation is recorded yet.")]
    measure = command("eval", facts.path)
    scores = stored_scores(facts.path, best)
    if scores:
        note = f"All held-out text, scored by eval after {plural(best, 'step')}. Lower is better."
        return [score_table(scores), Paragraph(note, soft=True)]
    evals = next(m["evals"] for m in facts.lines if m["step"] + 1 == best)
    sampled = {name: loss for name, loss in evals.items() if "/" not in name}
    references, problem = {}, ""
    if config.task in ("bytes", "pretrain"):
        known = facts.environment.fingerprint if facts.environment else None
        try:
            references = held_out_references(config, known, limit=REFERENCE_LIMIT)
        except (ValueError, OSError) as err:
            problem = f"xz, gzip and unigram are missing: {one_line(error_message(err))}"
    more = f"{measure} scores all held-out text."
    if not references and facts.unit != "byte":  # the bytes of its tokens are not known
        nats = [[Cell(name), Cell(f"{loss:.3f}", loss)] for name, loss in sampled.items()]
        table = Table([Column("Held out", text=True), Column("nats", hint="per token")], nats)
        note = f"Sampled at the best step, {best:,}; nats per token, lower is better. {more}"
        return [table, *(Paragraph(text, soft=True) for text in (note, problem) if text)]
    rows = {}
    for name in dict.fromkeys([*sampled, *references]):
        rows[name] = dict(references.get(name, {"uniform_bits": 8.0}))
        if name in sampled:
            ratio = rows[name]["tokens"] / rows[name]["bytes"] if name in references else float(facts.unit == "byte")
            rows[name] |= {
                "nats_per_token": sampled[name],
                "bits_per_byte": sampled[name] / math.log(2) * ratio or math.nan,
            }
    note = f"Sampled at the best step, {best:,}; bits per byte, lower is better. {more}"
    blocks: list[Block] = [score_table(rows), Paragraph(note, soft=True)]
    return [*blocks, Paragraph(problem, soft=True)] if problem else blocks


def score_table(scores: dict[str, dict[str, float]]) -> Table:
    """Return the scores of held-out sets, in bits per byte beside what needs no model."""

    def bits(value: float | None) -> Cell:
        return Cell("", None) if value is None or math.isnan(value) else Cell(f"{value:.3f}", value)

    columns = [Column("Held out", text=True), Column("bytes"), Column("nats", hint="per byte or token")]
    columns += [Column(name, over="bits per byte") for name in ("model", *REFERENCES)]
    rows = []
    for name, score in scores.items():
        size = score.get("bytes")
        cells = [Cell(name), Cell("") if size is None else count_cell(int(size)), bits(score.get("nats_per_token"))]
        rows.append([*cells, *(bits(score.get(f"{key}_bits")) for key in ("model", *REFERENCES))])
        rows[-1][3] = bits(score.get("bits_per_byte"))
    return Table(columns, rows)


# --- data --------------------------------------------------------------------------------------------


def _data(facts: RunFacts) -> list[Block]:
    return [*data_blocks(facts), *_skipped(facts)]


def data_blocks(facts: RunFacts, *, paths: bool = True) -> list[Block]:
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


def _skipped(facts: RunFacts) -> list[Block]:
    """Return how many files were not read, by reason. Their names are private, so they stay in skipped.json."""
    path = RunFolder(facts.path).skipped_path
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
    return [*map(Paragraph, lines), Paragraph(f"{path.name} of the run has the names.", soft=True)]


# --- samples -----------------------------------------------------------------------------------------


def _samples(facts: RunFacts) -> list[Block]:
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


def speed(facts: RunFacts) -> float | None:
    """Return the median of tokens per second, without the first steps after each start."""
    starts = {session.step for session in facts.environment.sessions} if facts.environment else {0}
    settling = {start + i for start in starts for i in range(SETTLING_STEPS)}
    rates = [m["tokens_per_s"] for m in facts.lines if "tokens_per_s" in m]
    settled = [m["tokens_per_s"] for m in facts.lines if "tokens_per_s" in m and m["step"] not in settling]
    return statistics.median(settled or rates) if rates else None


def training_time(facts: RunFacts) -> float | None:
    """Return the seconds of all sessions that have an end; None if they are not recorded."""
    sessions = facts.environment.sessions if facts.environment else []
    ends = [(s.started, s.ended) for s in sessions if s.ended]
    return (
        sum((datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds() for a, b in ends) if ends else None
    )


def _speed(facts: RunFacts, config: RunConfig) -> list[Block]:
    rate, seconds = speed(facts), training_time(facts)
    machine = facts.environment.sessions[-1].machine if facts.environment and facts.environment.sessions else {}
    processes = facts.environment.sessions[-1].processes if machine and facts.environment else None
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


def _memorization(facts: RunFacts, others: Sequence[Path]) -> list[Block]:
    """Return the results of the reports of `memorize` and `audit` in the run and in other folders, without texts."""
    pipeline = pipeline_of(facts.path)
    inside = [path for folder in (facts.path, pipeline) if folder for path in sorted(folder.iterdir()) if path.is_dir()]
    blocks: list[Block] = []
    for folder in dict.fromkeys([*inside, *others]):
        lines: list[str] = []
        for name, summary in (("audit.json", _audit_lines), ("report.json", _report_lines)):
            path = folder / name
            if not path.is_file():
                continue
            keep_private([path])
            try:
                lines += summary(parse_json(path.read_bytes()), facts)
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                if folder in others or name == "audit.json":
                    lines.append(f"{name} cannot be read.")
        if lines:
            blocks += [Paragraph(f"{files.display_path(folder)}:", soft=True), Lead(lines)]
    if blocks:
        return blocks
    memorize, audit = command("memorize", facts.path), command("audit", facts.path, "--out", facts.path / "audit")
    if facts.detail["state"] == "imported":
        audit = command("audit", facts.path, "--notes", "FOLDER", "--out", facts.path / "audit")
        return [Paragraph(f"Not measured. {audit} measures what it knows of notes that it was not trained on here.")]
    return [Paragraph(f"Not measured. {memorize} measures training documents, {audit} all notes.")]


def _audit_lines(verdict: dict[str, Any], facts: RunFacts) -> list[str]:
    if not _is_of(verdict["checkpoint"], facts):
        return []
    compared = verdict.get("base") and verdict["windows_over"]
    known = f" The base already knew {verdict['windows_known']:,} of them." if compared else ""
    so_far = " The audit was interrupted." if verdict.get("interrupted") else ""
    return [
        f"Audit after {plural(verdict['step'], 'step')}: {verdict['verdict']}. {_sentence(counts_text(verdict))}."
        f"{known}{so_far}"
    ]


def _report_lines(report: dict[str, Any], facts: RunFacts) -> list[str]:
    if not _is_of(report["checkpoint"], facts):
        return []
    settings = report["settings"]
    measured = f"windows of {settings['window']} {report['unit']}s, {settings['prompt']} of them given"
    return [f"Measured after {plural(report['step'], 'step')}: {measured}.", *headline(report)]


def _is_of(checkpoint: str, facts: RunFacts) -> bool:
    """Whether a checkpoint is in a run: by the end of its path, since the folder may have moved."""
    return Path(checkpoint).parent.parent.name == facts.path.resolve().name


# --- config, commands, environment -------------------------------------------------------------------


def _config(facts: RunFacts, config: RunConfig) -> list[Block]:
    rows = [
        [Cell(key), Cell(value_text(new)), Cell(value_text(old))]
        for key, (old, new) in facts.detail["differences"].items()
    ]
    columns = [Column("Key", text=True), Column("Value", text=True), Column("Default", text=True)]
    changed: Block = Table(columns, rows) if rows else Paragraph("All values are the defaults.")
    sections = SECTIONS if facts.detail["state"] == "imported" else ()
    return [changed, Details("config.yaml, every key", [Text(dump_config(config, sections=sections))])]


def reproduce_command(facts: RunFacts) -> str:
    """Return what to type to train the run again, from its config.yaml, which has every value that was used."""
    again = facts.path.with_name(f"{facts.path.resolve().name}-again")
    words: list[str | Path] = ["train", "--config", facts.path / "config.yaml", "--run-dir", again]
    sessions = facts.environment.sessions if facts.environment else []
    machine = sessions[-1].machine if sessions else {}
    words += ["--device", str(machine["device"])] if "device" in machine else []
    if sessions and sessions[-1].processes > 1:
        ranks = f"torchrun --nproc-per-node {sessions[-1].processes} -m niels_gpt"
        return " ".join([ranks, *(shlex.quote(str(word)) for word in words)])
    words += ["--threads", str(machine["threads"])] if machine.get("device") == "cpu" else []
    return command(*words)


def _reproduce(facts: RunFacts) -> list[Block]:
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


def _environment(facts: RunFacts) -> list[Block]:
    if not facts.environment or not facts.environment.sessions:
        return [Paragraph(f"Versions: {NOT_RECORDED}.")]
    machines = [session.machine for session in facts.environment.sessions]
    rows = []
    for key, name in {**VERSIONS, "triton": "Triton"}.items():
        values = dict.fromkeys(str(machine.get(key) or "none") for machine in machines)
        rows.append((name, ", then ".join(values)))
    return [Facts(rows)]


def final_metrics(facts: RunFacts) -> dict[str, str]:
    """Return the results of a run by name, for a comparison."""
    detail, rate, seconds = facts.detail, speed(facts), training_time(facts)
    found = {
        "state": facts.state,
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
