"""Measure the selected documents of a run, at one checkpoint or at all that it kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.memorization.base_model import load_base, with_base
from niels_gpt.memorization.measure import (
    Document,
    ExtractionSettings,
    Measurement,
    WindowPlan,
    check_documents,
    measure,
    position_map,
)
from niels_gpt.memorization.progress import Progress, ProgressBar, no_progress
from niels_gpt.memorization.selection import SelectedDocuments
from niels_gpt.memorization.summary import build_report, curve_entry
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system.checked_json import FIELD, checksum

STRIPS = 24
"""Documents whose map is part of a report."""


GROUP_WINDOWS = 500
"""Documents are measured in groups of about so many windows: large enough for full batches, and Ctrl-C loses one."""


class RunMeasurement(NamedTuple):
    """A report and the measurements behind it."""

    report: dict[str, Any]
    measurements: Sequence[Measurement]
    interrupted: str = ""
    """What Ctrl-C left unmeasured; empty: all was measured."""


def measure_run(
    loaded: LoadedRun,
    selected: SelectedDocuments,
    settings: ExtractionSettings,
    *,
    curve: bool = True,
    passages: int = 20,
    progress: ProgressBar = no_progress,
) -> RunMeasurement:
    """Measure the documents at the loaded checkpoint and, with `curve`, at every checkpoint of its run.

    Ctrl-C ends the work early: the report then has the documents and checkpoints that were measured completely. It
    raises KeyboardInterrupt if there is none.
    """
    measurements: list[Measurement] = []
    checkpoints: list[dict[str, Any]] = []
    positions: dict[str, Any] | None = None
    interrupted = compared = base_problem = ""
    try:
        with progress("measuring") as show:
            measurements.extend(_measure_in_groups(loaded, selected.documents, settings, show))
        if curve:
            checkpoints.extend(measure_checkpoints(loaded, selected, settings, progress=progress))
        base, base_problem = load_base(loaded)
        if base is not None:
            with progress("measuring the base") as show:
                measurements = with_base(measurements, base, tokenizer=loaded.tokenizer, progress=show)
            compared = base.name
        if loaded.model.config.positions == "learned":
            with progress("measuring at several offsets"):
                positions = position_map(loaded.model, selected.documents, settings)
    except KeyboardInterrupt:
        if not measurements:
            raise
        total = len(selected.documents)
        interrupted = f"{len(measurements):,} of {total:,} documents were measured"
        if len(measurements) == total:
            interrupted += f", and {len(checkpoints)} of {len(_kept(loaded))} checkpoints" if curve else ""
    report = build_report(
        loaded,
        measurements,
        title=f"What {loaded.home.path.name if loaded.home else loaded.path.name} has memorized",
        base=compared,
        checkpoints=checkpoints,
        position_map=positions,
        passages=passages,
        strips=STRIPS,
    )
    if selected.train_tokens is not None:
        report["train_tokens"] = selected.train_tokens
    if base_problem:
        report["base_problem"] = base_problem
    if interrupted:
        report["interrupted"] = interrupted
    report[FIELD] = checksum(json.loads(json.dumps(report)))  # `law_points` reads the file again
    return RunMeasurement(report, measurements, interrupted)


def _measure_in_groups(
    loaded: LoadedRun, documents: Sequence[Document], settings: ExtractionSettings, progress: Progress
) -> Iterator[Measurement]:
    """Yield the measurement of every document, group by group."""
    check_documents(loaded.model, documents, loaded.tokenizer)
    sizes = [len(WindowPlan.of(len(document.ids), settings).starts) for document in documents]
    sized = zip(documents, sizes, itertools.accumulate(sizes, initial=0), strict=False)
    for _, members in itertools.groupby(sized, key=lambda member: member[2] // GROUP_WINDOWS):
        group, windows, before = zip(*members, strict=True)

        def show(rows: int, of: int | None, done: int = before[0], windows: int = sum(windows)) -> None:
            progress(done + windows * rows // max(of or 0, 1), sum(sizes))

        yield from measure(loaded.model, group, loaded.tokenizer, settings, progress=show)


def _kept(loaded: LoadedRun) -> list[Path]:
    """The checkpoints that the run kept, oldest first."""
    return list(reversed(loaded.home.step_files())) if loaded.home else []


def measure_checkpoints(
    loaded: LoadedRun,
    selected: SelectedDocuments,
    settings: ExtractionSettings,
    *,
    progress: ProgressBar = no_progress,
) -> Iterator[dict[str, Any]]:
    """Yield a `curve_entry` for every checkpoint that the run kept, without greedy decoding."""
    settings = dataclasses.replace(settings, greedy=0)
    for path in _kept(loaded):
        model, step = load_model(path, str(loaded.model.device))
        with progress(f"step {step}") as show:
            measurements = measure(model, selected.documents, loaded.tokenizer, settings, progress=show)
        entry = curve_entry(step, measurements)
        if selected.epochs is not None:
            entry["epochs"] = float(selected.epochs[min(step, len(selected.epochs) - 1)])
        yield entry


def report_folder(loaded: LoadedRun, name: str = "memorization") -> Path:
    """Return the default folder of a report: in the run, or beside a checkpoint that is in none."""
    return (loaded.home.path if loaded.home else loaded.path.parent) / name
