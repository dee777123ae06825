"""`niels-gpt splice select`, `coverage`, `study` and `fit`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.markup import escape
from rich.table import Table

from niels_gpt.cli.tables import show_table
from niels_gpt.cli.train import exit_if_stopped, train_and_report, with_data
from niels_gpt.config import RunConfig
from niels_gpt.config.splice import SingleSelectMode, SpliceConfig, log
from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.source_paths import display_name
from niels_gpt.memorization.measure import ExtractionSettings
from niels_gpt.report.coverage import coverage_page, coverage_png, coverage_text
from niels_gpt.report.histogram import histogram_text
from niels_gpt.report.law import LawPoint, fit_law, law_page, law_png, law_text
from niels_gpt.runs.folder import RunFolder
from niels_gpt.splice.coverage import cover, epoch_spans, frames_needed, step_spans
from niels_gpt.splice.frames import Spans
from niels_gpt.system import files
from niels_gpt.system.console import plural
from niels_gpt.system.device import resolve_device
from niels_gpt.training.tasks.documents import SourceDocuments, open_documents
from niels_gpt.training.tasks.splice_task import SpliceTask, choose_documents, unique_names
from niels_gpt.training.tasks.token_task import with_vocabulary

_LISTED = 10
"""Documents that a policy's column lists."""


def splice_run(config: Path | None, overrides: list[str], data: Mapping[str, str | None]) -> RunConfig:
    """The config of a splice run. Raises ValueError for one of another task."""
    resolved = with_data(load_config(config, overrides=overrides), data)
    if config is None:
        resolved = dataclasses.replace(resolved, task="splice")
    if resolved.task != "splice":
        raise ValueError(f"{config} is a run of the task {resolved.task}: its task must be splice")
    return with_vocabulary(resolved)


def run_select(*, config: Path | None, overrides: list[str], data: Mapping[str, str | None], as_json: bool) -> None:
    resolved = splice_run(config, overrides, data)
    library = open_documents(resolved)
    shelf, splice, S = library.train, resolved.splice, resolved.model.T
    choices = _policies(splice, library, S)
    fitting = splice.within_limits(shelf.lengths, ends=shelf.ends, S=S)
    if not as_json:  # before the choice: where it fails, this shows why
        _show_candidates(library, fitting)
        if not all(isinstance(choice, str) for choice in choices.values()):  # else one error says it
            _show_policies(choices, library, splice)
    task = SpliceTask(resolved, library)
    chosen, names = task.chosen, task.names
    if as_json:
        controls = [(i, library.held_out.name(i), int(library.held_out.lengths[i])) for i in task.controls]
        found = {
            "source": library.source,
            "place": library.place,
            "documents": len(shelf.lengths),
            "candidates": len(fitting),
            "chosen": _rows(zip(chosen, names, task.dataset.lengths.tolist(), strict=True)),
            "policies": choices,
            "controls": _rows(controls),
            "examples_per_epoch": len(task.dataset),
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print("\nchosen" + (f" by doc_index={splice.doc_index}" if splice.doc_index is not None else ""))
    for i, name in list(zip(chosen, names, strict=True))[:50]:
        print(f"  {i:>6}  {int(shelf.lengths[i]):>9,}  {name}")
    if len(chosen) > 50:
        print(f"  and {len(chosen) - 50:,} more")
    print("controls (held out, never trained on)")
    for i in task.controls:
        print(f"  {i:>6}  {int(library.held_out.lengths[i]):>9,}  {library.held_out.name(i)}")
    for note in task.notes():
        print(note)


def _rows(documents: Iterable[tuple[int, str, int]]) -> list[dict[str, Any]]:
    return [{"document": i, "name": name, "length": length} for i, name, length in documents]


def _policies(splice: SpliceConfig, library: SourceDocuments, S: int) -> dict[str, list[int] | str]:
    """What each policy would choose, or why it cannot. What they have to say is said when one is taken."""
    choices: dict[str, list[int] | str] = {}
    log.disabled = True
    try:
        for mode in get_args(SingleSelectMode):
            wanted = dataclasses.replace(splice, doc_index=None, doc_select_mode=mode)
            try:
                choices[mode] = choose_documents(wanted, library, S)
            except ValueError as err:
                choices[mode] = str(err)
    finally:
        log.disabled = False
    return choices


def _show_candidates(library: SourceDocuments, fitting: np.ndarray) -> None:
    lengths = library.train.lengths
    held_out = plural(len(library.held_out.lengths), "document")
    source = display_name(library.source, library.place)
    print(f"{source} ({library.place}): {plural(len(lengths), 'document')} to train on, "
          f"{len(fitting):,} within the limits, {held_out} held out")  # fmt: skip
    print("tokens per document:")
    for line in histogram_text(lengths[fitting] if len(fitting) else lengths):
        print(f"  {line}")


def _show_policies(choices: Mapping[str, list[int] | str], library: SourceDocuments, splice: SpliceConfig) -> None:
    """What each policy would choose, side by side."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    for mode in choices:
        table.add_column(f"{mode}{' (config)' if mode == splice.doc_select_mode else ''}", overflow="fold")
    cells = []
    for chosen in choices.values():
        if isinstance(chosen, str):
            cells.append([chosen])
            continue
        names = unique_names(library.train, chosen[:_LISTED])
        column = [f"{name} ({int(library.train.lengths[i]):,})" for i, name in zip(chosen, names, strict=False)]
        cells.append(column + ([f"and {len(chosen) - _LISTED:,} more"] if len(chosen) > _LISTED else []))
    for row in itertools.zip_longest(*cells, fillvalue=""):
        table.add_row(*map(escape, row))
    print("\nwhat each policy would choose, with tokens:")
    show_table(table)


def run_coverage(
    *,
    config: Path | None,
    overrides: list[str],
    data: Mapping[str, str | None],
    steps: int | None,
    epochs: int,
    png: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    resolved = splice_run(config, overrides, data)
    task = SpliceTask(resolved)
    dataset, train = task.dataset, resolved.train
    if steps is not None:
        spans = step_spans(dataset, train.seed, steps, train.B, shuffle=resolved.splice.shuffle)
        title = f"{plural(steps, 'step')} of {plural(train.B, 'example')}"
    else:
        spans = (part for epoch in range(epochs) for part in epoch_spans(dataset, epoch))
        title = plural(epochs, "epoch")
    lengths: list[np.ndarray] = []
    documents = cover(dataset, task.names, noted(spans, lengths))
    examples, frames = frames_needed(lengths, dataset.S, train.B, packed=task.packed)
    title = f"{library_name(task)}: {title}"
    _make_folders(png, html)
    if png is not None:
        coverage_png(documents, png, title=title, examples=examples, frames=frames)
    if html is not None:
        files.write_text(html, coverage_page(documents, title=title, examples=examples, frames=frames))
    if as_json:
        rows = [
            {"name": d.name, "tokens": d.length, "seen": d.seen.tolist(), "supervised": d.supervised.tolist()}
            for d in documents
        ]
        found = {"title": title, "examples": examples, "frames": frames, "documents": rows}
        print(json.dumps(found, ensure_ascii=False))
        return
    for line in coverage_text(documents, title=title, examples=examples, frames=frames):
        print(line)
    for path in (png, html):
        if path is not None:
            print(f"wrote {path}")


def _make_folders(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)


def noted(spans: Iterable[Spans], lengths: list[np.ndarray]) -> Iterator[Spans]:
    """The spans, their lengths noted on the way: an epoch may be too long to keep."""
    for part in spans:
        lengths.append(part.length.astype(np.int32))
        yield part


def library_name(task: SpliceTask) -> str:
    """What is covered, for a title."""
    splice = task.config.splice
    how = f"{splice.balance_mode}, tau {splice.balance_tau:g}" if len(task.chosen) > 1 else splice.content_start_mode
    return f"{task.library.source}, {how}"


def run_fit(*, runs: list[Path], png: Path | None, html: Path | None, as_json: bool) -> None:
    points = [point for run in runs for point in points_of(run)]
    law = fit_law(points)
    title = "log P(z) against epochs and tokens"
    _make_folders(png, html)
    if png is not None:
        law_png(points, law, png, title=title)
    if html is not None:
        files.write_text(html, law_page(points, law, title=title))
    if as_json:
        found = {"law": dataclasses.asdict(law), "points": [dataclasses.asdict(point) for point in points]}
        print(json.dumps(found, indent=2))
        return
    for line in law_text(law):
        print(line)
    for path in (png, html):
        if path is not None:
            print(f"wrote {path}")


def points_of(run: Path) -> list[LawPoint]:
    """The checkpoints of a measured run as points of the law. Raises ValueError where it was not measured."""
    path = run / "memorisation" / "report.json"
    if not run.is_dir():
        raise ValueError(f"no run {run}")
    points: list[LawPoint] = []
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        tokens, checkpoints = report["train_tokens"], report["checkpoints"]
        for checkpoint in checkpoints:
            trained = [d["mean_log_p"] for d in checkpoint["documents"] if not d["control"]]
            if checkpoint["epochs"] > 0 and trained:
                name = f"{run.name}, step {checkpoint['step']}"
                points.append(LawPoint(checkpoint["epochs"], tokens, float(np.mean(trained)), name))
    except FileNotFoundError:
        raise ValueError(f"{run} was not measured: niels-gpt memorize --run {shlex.quote(str(run))}") from None
    except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError) as err:
        raise ValueError(f"{path} is no report of a splice run ({err!r}): measure the run again") from None
    return points


def run_study(
    *,
    config: Path | None,
    overrides: list[str],
    data: Mapping[str, str | None],
    vary: str,
    out: Path,
    wanted: Mapping[str, Any],
    device: str,
) -> None:
    from niels_gpt.cli.memorize import measure_run

    key, equals, values = vary.partition("=")
    if not equals or not all(value.strip() for value in values.split(",")):
        raise ValueError(f"--vary takes KEY=A,B,C, got {vary!r}")
    wished = [value.strip() for value in values.split(",")]
    if len(set(wished)) < len(wished):
        raise ValueError(f"--vary takes different values, got {vary!r}")
    runs = [(value, RunFolder(out / f"{key.split('.')[-1]}-{value}")) for value in wished]
    device = resolve_device(device)
    configs = {value: splice_run(config, [*overrides, f"{key}={value}"], data) for value, _ in runs}
    shortest = min(resolved.model.T for resolved in configs.values())
    settings = ExtractionSettings.fitting(shortest, **wanted)  # the same for all runs, so that they compare
    for resolved in configs.values():  # what cannot be done is said before anything is
        SpliceTask(resolved)
    done = []
    for value, run in runs:
        resume = run.exists
        print(f"\n{key} = {value}: {run.path}" + (" (going on)" if resume else ""))
        result = train_and_report(configs[value], run, device=device, resume=resume)
        exit_if_stopped(result.signal, result, run, command="the same command again")
        measure_run(run, device=device, settings=settings)
        done.append(run.path)
    print()
    run_fit(runs=done, png=out / "law.png", html=out / "law.html", as_json=False)
