"""The comparison of several runs: curves in common charts, final metrics, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from niels_gpt.report.charts import COLORS, Chart, Series
from niels_gpt.report.curves import MOST_DOTS, selection_curve, smooth
from niels_gpt.report.document import Block, Cell, Charts, Column, Document, Paragraph, Section, Table, Text
from niels_gpt.report.run_report import (
    NOT_RECORDED,
    VERSIONS,
    final_metrics,
    metric_series,
    reproduce_command,
    thinned,
)
from niels_gpt.runs.catalog import config_table, value_text, without_own_paths
from niels_gpt.runs.info import RunInfo


def comparison(runs: Mapping[str, RunInfo]) -> Document:
    """Return the comparison of runs by name."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M")
    return Document(
        f"Runs {', '.join(runs)}" if len(runs) <= 4 else f"{len(runs)} runs",
        f"Comparison of {', '.join(runs)}, {now}",
        [
            Section("Final metrics", [_by_run("Metric", {name: final_metrics(facts) for name, facts in runs.items()})]),
            Section("Curves", _curves(runs)),
            Section("Config values that differ", _config(runs)),
            Section("Environment", _environment(runs)),
            Section("Reproduce", _reproduce(runs)),
        ],
    )


def _reproduce(runs: Mapping[str, RunInfo]) -> list[Block]:
    """Return the commands that train the runs again; imported models have none."""
    commands = [reproduce_command(facts) for facts in runs.values() if facts.detail["state"] != "imported"]
    return [Text("\n".join(commands)) if commands else Paragraph("Imported models: no step was trained here.")]


def _by_run(heading: str, values: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table of {run: {key: value}}, with one row per key and one column per run."""
    keys = dict.fromkeys(key for found in values.values() for key in found)
    rows = [[Cell(key), *(Cell(found.get(key, "")) for found in values.values())] for key in keys]
    return Table([Column(heading, text=True), *(Column(name, text=True) for name in values)], rows)


def _curves(runs: Mapping[str, RunInfo]) -> list[Block]:
    """Return charts of the losses, one pair per unit: a loss per byte and one per token cannot be compared."""
    looks = {name: (f"c{i % COLORS}", "dash" if i >= COLORS else "") for i, name in enumerate(runs)}
    charts = []
    for unit in dict.fromkeys(facts.unit for facts in runs.values()):
        training, validation = [], []
        for name, facts in runs.items():
            lines = [m for m in facts.lines if "loss" in m] if facts.unit == unit else []
            color, style = looks[name]
            x, y = thinned(*selection_curve(facts.tree, lines))
            if x:
                dots = len(x) <= MOST_DOTS
                validation.append(Series(name, x, y, color=color, style=style, label=name, dots=dots))
            if lines:
                skipped = len(lines) // 50 if len(lines) >= 100 else 0  # the initial fall from ln V
                steps, losses = [m["step"] + 1 for m in lines], smooth([m["loss"] for m in lines])
                x, y = thinned(steps[skipped:], losses[skipped:])
                training.append(Series(name, x, y, color=color, style=style, label=name))
        label = f"nats per {unit}"
        charts += [Chart("Validation loss", label, validation, x_whole=True)] if validation else []
        charts += [Chart("Training loss, smoothed", label, training, x_whole=True)] if training else []
    if not charts:
        return [Paragraph("No step is recorded yet.")]
    for key, title, unit in (("lr", "Learning rate", ""), ("tokens_per_s", "Speed", "bytes or tokens per second")):
        looked = ((name, facts, *looks[name]) for name, facts in runs.items())
        found = [metric_series(facts, key, label=name, color=c, style=s) for name, facts, c, s in looked]
        series = [line for line in found if line is not None]
        charts += [Chart(title, unit, series, y_low=0, x_whole=True)] if series else []
    return [Charts(charts)]


def _config(runs: Mapping[str, RunInfo]) -> list[Block]:
    found = without_own_paths(config_table(runs), [facts.path for facts in runs.values()])
    if not found:
        return [Paragraph("The configs are equal, except for paths inside the runs.")]
    by_run = {
        name: {key: "" if values[i] is None else value_text(values[i]) for key, values in found.items()}
        for i, name in enumerate(runs)
    }
    return [_by_run("Key", by_run)]


def _environment(runs: Mapping[str, RunInfo]) -> list[Block]:
    """Return the versions and devices of the last session of each run."""
    by_run = {}
    for name, facts in runs.items():
        machine = facts.last_session.machine if facts.last_session else {}
        found = {title: str(machine.get(key) or "none") if machine else NOT_RECORDED for key, title in VERSIONS.items()}
        devices = "; ".join(machine.get("devices", []))
        by_run[name] = {**found, "Device": str(machine.get("device", NOT_RECORDED)), "Hardware": devices}
    return [_by_run("Version", by_run)]
