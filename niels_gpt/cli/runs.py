"""`niels-gpt runs`: list, show, compare and remove runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.options import RUNS, JsonOption, OptionalPath, RunsDirOption, output_option
from niels_gpt.cli.report import report
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.runs.info import RunInfo

app = App(help="List, show, compare, report and remove runs.")
app.command("report")(report)


@app.command("list")
def list_(runs_dir: RunsDirOption = RUNS, json: JsonOption = False) -> None:
    """List the runs, newest first."""
    from json import dumps

    from niels_gpt.runs.catalog import newest_first

    found = newest_first(runs_dir)
    if json:
        print(dumps([run.summary for run in found], indent=2))
    elif found:
        _show_table(found)
    else:
        print(_no_runs(runs_dir))


@app.command("show")
def show(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run: its path or name; default: the newest.")] = "",
    runs_dir: RunsDirOption = RUNS,
    json: JsonOption = False,
) -> None:
    """Show a run: data, settings that differ from the defaults, checkpoints, results, next commands."""
    from json import dumps

    from niels_gpt.runs.catalog import locate, newest_first, resolve_runs
    from niels_gpt.runs.info import RunInfo
    from niels_gpt.runs.pipeline import pipeline_of

    paths = resolve_runs(run, runs_dir) if run else [newest.path for newest in newest_first(runs_dir)[:1]]
    if not paths:
        raise ValueError(_no_runs(runs_dir))
    details = [RunInfo(path).detail for path in paths]
    if json:
        print(dumps(details if len(details) > 1 else details[0], indent=2))
        return
    named = locate(run, runs_dir) if run else None
    pipeline = named if any(pipeline_of(path) == named for path in paths) else None
    for number, detail in enumerate(details):
        print("\n" * bool(number) + str(detail["path"]))
        _print_details(detail, show_next=pipeline is None)
    if pipeline is not None:
        print(f"\n{pipeline}")
        _print_rows([("next", line) for line in dict.fromkeys(c for d in details[::-1] for c in d.get("next", []))])


@app.command("compare")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs: paths or names.")],
    out: Annotated[
        OptionalPath, output_option("--out", "PNG file; default: compare-A-B.png in the folder of runs.")
    ] = None,
    runs_dir: RunsDirOption = RUNS,
    json: JsonOption = False,
) -> None:
    """Draw the losses of several runs in one picture, and list the config values that differ."""
    from json import dumps

    from niels_gpt.report.curves import plot_comparison
    from niels_gpt.runs.catalog import config_table, resolve_runs, unique_names, without_own_paths
    from niels_gpt.runs.info import RunInfo

    paths = list(dict.fromkeys(path for run in runs for path in resolve_runs(run, runs_dir)))
    if len(paths) < 2:
        got = ", ".join(map(str, paths))
        raise ValueError(f"compare needs two runs, got {got}: {command('runs', 'list')} shows all")
    named = {name: RunInfo(path, name) for name, path in unique_names(paths, runs_dir).items()}
    for run in named.values():
        if run.state == "damaged":
            raise ValueError(f"{run.path} cannot be compared: {run.problem}")
    if out is None:
        out = runs_dir / f"compare-{'-'.join(name.replace('/', '-') for name in named)}"[:200]
        out = out.with_name(out.name + ".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    plot_comparison(named, out)
    table = config_table(named)
    if json:
        print(dumps({"runs": [run.summary for run in named.values()], "config": table, "picture": str(out)}, indent=2))
        return
    _show_table(list(named.values()))
    print()
    if not table:
        print("the configs are equal")
    elif shown := without_own_paths(table, paths):
        _show_config_table(shown, list(named))
    else:
        print("the configs are equal, except for paths inside the runs")
    print(f"curves: {out}")


@app.command("rm")
def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, pipelines or studies: paths or names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDirOption = RUNS,
) -> None:
    """Remove runs from the disk."""
    from niels_gpt.runs.catalog import check_removable, locate, remove
    from niels_gpt.runs.info import disk_usage
    from niels_gpt.system.console import plural

    paths = list(dict.fromkeys(locate(run, runs_dir) for run in runs))
    for path in paths:  # all of them or none
        inside = check_removable(path)
        several = f", {plural(len(inside), 'run')}" if inside != [path] else ""
        print(f"{path} ({_size(disk_usage(path))}{several})")
    if not yes and not typer.confirm(f"Remove {'it' if len(paths) == 1 else 'them'} for good?"):
        print("nothing removed")
        raise typer.Exit(1)
    freed = [remove(path) for path in paths]
    total = None if None in freed else sum(size for size in freed if size)
    print(f"removed {', '.join(map(str, paths))}: {_size(total)} freed")


def _show_table(runs: Sequence[RunInfo]) -> None:
    from datetime import datetime

    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.system.console import short_number

    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("when", no_wrap=True)
    table.add_column("what")
    for name in ("size", "steps", "best loss", "bits/byte", "disk"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for run in runs:
        when = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
        steps = "" if run.steps is None else f"{run.steps:,}" + (f"/{run.total_steps:,}" * (run.state != "finished"))
        table.add_row(
            escape(run.name),
            when,
            run.task or "",
            "" if run.parameters is None else short_number(run.parameters),
            steps,
            "" if run.best_loss is None else f"{run.best_loss:.3f}",
            "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}",
            _size(run.disk),
            run.state,
        )
    show_table(table, width=120)
    for run in runs:
        if run.problem:
            print(f"{run.name} is damaged: {run.problem}")


def _no_runs(runs_dir: Path) -> str:
    return f"no runs in {runs_dir}/: {command('notes', 'FOLDER')}, {command('demo')} or {command('train')} makes one"


def _print_details(detail: dict[str, Any], *, show_next: bool) -> None:
    """Print `RunInfo.detail`, with or without the next commands."""
    from datetime import datetime

    from niels_gpt.runs.catalog import value_text
    from niels_gpt.runs.source import source_text

    if detail["state"] == "damaged":
        print(f"  damaged: {detail['problem']}; {_size(detail['disk'])} on disk")
        return
    when = datetime.fromtimestamp(detail["changed"]).strftime("%Y-%m-%d %H:%M")
    steps = "" if detail["steps"] is None else f", {detail['steps']:,} of {detail['total_steps']:,} steps"
    task = "" if detail["task"] is None else f"{detail['task']}, "
    rows = [
        ("state", f"{detail['state']}{steps}, last changed {when}"),
        ("model", f"{task}{detail['parameters']:,} parameters, T={detail['context']}, V={detail['vocabulary']}"),
        *([("source", source_text(detail["source"]))] if detail["source"] else []),
        *(("data", line) for line in detail["data"]),
        *([("topics", f"{detail['topics']} lists those that it was taught")] if detail["topics"] else []),
    ]
    if detail["best_loss"] is not None:
        bits = "" if detail["bits_per_byte"] is None else f", {detail['bits_per_byte']:.3f} bits per byte"
        rows.append(("best", f"validation loss {detail['best_loss']:.4f} after {detail['best_step']:,} steps{bits}"))
    if detail["last"]:
        last = detail["last"]
        rows.append(("last", f"loss {last['loss']:.4f}, learning rate {last['lr']:.3g}" if "lr" in last else str(last)))
    rows += [("evals", f"{name} {value:.4f}") for name, value in detail["last_evals"].items()]
    same = detail["same_files"]
    for name, size in detail["checkpoints"].items():
        rows.append(("checkpoint", f"{name}  " + (f"same file as {same[name]}" if name in same else _size(size))))
    rows.append(("disk", _size(detail["disk"])))
    for key, (old, new) in detail["differences"].items():
        rows.append(("changed", f"{key} = {value_text(new)}  (default {value_text(old)})"))
    rows += [("next", line) for line in detail["next"] if show_next]
    _print_rows(rows)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    """Print labeled lines; a label that repeats is printed once."""
    before = ""
    for label, text in rows:
        print(f"  {'' if label == before else label:10}  {text}")
        before = label


def _show_config_table(table: dict[str, list[Any]], names: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.cli.tables import one_line_cell, show_table
    from niels_gpt.runs.catalog import value_text

    shown = Table(box=None, pad_edge=False)
    shown.add_column("config", no_wrap=True)
    for name in names:
        shown.add_column(escape(name), overflow="fold")
    for key, values in table.items():
        shown.add_row(escape(key), *(one_line_cell("" if value is None else value_text(value)) for value in values))
    show_table(shown, width=120)


def _size(number: int | None) -> str:
    from niels_gpt.system.console import short_number

    return "?" if number is None else f"{short_number(number)}B"
