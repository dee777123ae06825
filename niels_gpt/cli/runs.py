"""Finding runs, and the models in them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

from niels_gpt.device import resolve_device
from niels_gpt.model.checkpoint import load_model
from niels_gpt.model.gpt import GPT
from niels_gpt.train.run_folder import RunFolder

RUNS = Path("runs")


class Loaded(NamedTuple):
    """A model ready for use, and where it comes from."""

    model: GPT
    step: int
    path: Path
    run: RunFolder | None


def new_run(name: str) -> RunFolder:
    """A run folder that is not taken: runs/name, runs/name-2, ..."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for run in (RunFolder(RUNS / n) for n in names) if not run.path.exists())


def find_run(path: Path | None) -> RunFolder:
    """The run at a path, or the newest in runs/. Raises ValueError where there is none."""
    if path is not None:
        run = RunFolder(path)
        run.read_config()
        return run
    found = [RunFolder(p.parent) for p in RUNS.glob("*/config.yaml")]
    if not found:
        raise ValueError(f"no run in {RUNS}/: train one first (niels-gpt demo), or name one with --run")
    newest = max(found, key=lambda run: run.config_path.stat().st_mtime_ns)
    print(f"using {newest.path}", file=sys.stderr)
    return newest


def load(run: Path | None, checkpoint: Path | None, device: str) -> Loaded:
    """The model of a checkpoint, or the best one of a run. Raises ValueError or OSError where it cannot."""
    device = resolve_device(device)
    if checkpoint is not None:
        folder = RunFolder(run) if run is not None else None
        model, step = load_model(checkpoint, device)
        return Loaded(model, step, checkpoint, folder)
    folder = find_run(run)
    path = folder.model_path()
    model, step = load_model(path, device)
    return Loaded(model, step, path, folder)
