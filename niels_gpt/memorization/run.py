"""Measure the selected documents of a run, at one checkpoint or at all that it kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.memorization.measure import ExtractionSettings, Measurement, measure
from niels_gpt.memorization.positions import position_map
from niels_gpt.memorization.selection import SelectedDocuments
from niels_gpt.memorization.summary import build_report, curve_entry
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.loading import LoadedRun

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in total)."""
ProgressBar = Callable[[str], AbstractContextManager[Progress | None]]
"""Opens a progress display with this title."""
STRIPS = 24
"""Documents whose map is part of a report."""


def no_progress(title: str) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


class RunMeasurement(NamedTuple):
    """A report and the measurements behind it."""

    report: dict[str, Any]
    measurements: Sequence[Measurement]


def measure_run(
    loaded: LoadedRun,
    selected: SelectedDocuments,
    settings: ExtractionSettings,
    *,
    curve: bool = True,
    passages: int = 20,
    progress: ProgressBar = no_progress,
) -> RunMeasurement:
    """Measure the documents at the loaded checkpoint and, with `curve`, at every checkpoint of its run."""
    with progress("measuring") as show:
        measurements = measure(loaded.model, selected.documents, loaded.tokenizer, settings, progress=show)
    report = build_report(
        loaded.model,
        measurements,
        loaded.tokenizer,
        title=f"What {loaded.home.path.name if loaded.home else loaded.path.name} has memorized",
        checkpoint=str(loaded.path),
        step=loaded.step,
        checkpoints=measure_checkpoints(loaded, selected, settings, progress=progress) if curve else [],
        position_map=position_map(loaded.model, selected.documents, settings),
        passages=passages,
        strips=STRIPS,
    )
    if selected.train_tokens is not None:
        report["train_tokens"] = selected.train_tokens
    return RunMeasurement(report, measurements)


def measure_checkpoints(
    loaded: LoadedRun, selected: SelectedDocuments, settings: ExtractionSettings, *, progress: ProgressBar = no_progress
) -> list[dict[str, Any]]:
    """Return a `curve_entry` for every checkpoint that the run kept, without greedy decoding."""
    paths = list(reversed(loaded.home.step_files())) if loaded.home else []
    settings = dataclasses.replace(settings, greedy=0)
    entries = []
    for path in paths:
        model, step = load_model(path, str(loaded.model.device))
        with progress(f"step {step}") as show:
            measurements = measure(model, selected.documents, loaded.tokenizer, settings, progress=show)
        entry = curve_entry(step, measurements)
        if selected.epochs is not None:
            entry["epochs"] = float(selected.epochs[min(step, len(selected.epochs) - 1)])
        entries.append(entry)
    return entries


def report_folder(loaded: LoadedRun, name: str = "memorization") -> Path:
    """Return the default folder of a report: in the run, or beside a checkpoint that is in none."""
    return (loaded.home.path if loaded.home else loaded.path.parent) / name
