"""Send the lines of metrics.jsonl to TensorBoard, or to an offline run of Weights & Biases, as they are written.

A tracker begins anew at every start of a run: it reads metrics.jsonl up to the first step, then receives each line. So
a resumed run has every step once, also those of a killed process, and a run may be tracked from any start on.

Nothing leaves the machine: W&B runs in offline mode, and gets the numbers of the model and the training only. Paths,
samples and the names of documents are not tracked.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import files
from niels_gpt.system.console import one_line
from niels_gpt.training.progress import Reporter, Silent, headline_evals

INSTALL = "pip install 'niels-gpt[track]'"
_WANDB_QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
}


class Tracker(Protocol):
    """Writes the metrics of a run into a folder of it."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        """Begin anew: remove what an earlier start wrote."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in `tensorboard/` of the run: `tensorboard --logdir RUN`."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / "tensorboard"
        for path in files.matching(folder, "events.out.tfevents.*"):
            path.unlink(missing_ok=True)
        # purge_step: a TensorBoard that has read the removed files forgets them.
        self._writer = SummaryWriter(str(folder), purge_step=0, flush_secs=5)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """An offline run of Weights & Biases in `wandb/` of the run; `wandb sync` would upload it."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        folder = run / "wandb"
        for path in files.matching(folder, "offline-run-*"):
            shutil.rmtree(path)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(_WANDB_QUIET)
        for name in ("CONFIG", "CACHE", "DATA"):  # by default in the home of the user
            os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / name.lower()))
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            mode="offline",
            project="niels-gpt",
            name=run.resolve().name,
            dir=str(run),
            config={"task": config.task, "model": _numbers(config.model), "train": _numbers(config.train)},
            settings=wandb.Settings(console="off", host="local", x_disable_stats=True, x_disable_meta=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is not in TRACKERS, and for one whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"--track must be {' or '.join(TRACKERS)}, got {name!r}")
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of this name in the working directory has no origin
            raise ValueError(f"--track {name} needs the package {name}, which is not installed: {INSTALL}")


class Tracking(Silent):
    """A reporter that passes the steps on to trackers. One that fails is dropped with a warning: training goes on."""

    def __init__(self, run: RunFolder, config: RunConfig, names: Sequence[str], warn: Reporter) -> None:
        """`warn` prints the warnings."""
        self._run, self._config, self._names, self._warn = run, config, dict.fromkeys(names), warn
        self._trackers: dict[str, Tracker] = {}

    def start(self, *, first: int, total: int) -> None:
        earlier = [line for line in self._run.metrics() if line["step"] < first]
        for name in self._names:
            try:
                self._trackers[name] = TRACKERS[name](self._run.path, self._config)
            except Exception as err:  # of another package: anything
                self._drop(name, err)
        for line in earlier:
            self.step(line)

    def step(self, line: dict[str, Any]) -> None:
        values = {name: value for name, value in line.items() if name not in ("step", "evals")}
        values |= {f"evals/{name}": value for name, value in headline_evals(line.get("evals", {})).items()}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(line["step"], values)
            except Exception as err:
                self._drop(name, err)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as err:
                self._drop(name, err)

    def _drop(self, name: str, err: Exception) -> None:
        self._trackers.pop(name, None)
        self._warn.note(f"warning: {name} has stopped, metrics.jsonl has all steps: {one_line(str(err))}")


class Several:
    """Passes the progress of a run on to several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def data(self, task: Any) -> None:
        for reporter in self._reporters:
            reporter.data(task)

    def start(self, *, first: int, total: int) -> None:
        for reporter in self._reporters:
            reporter.start(first=first, total=total)

    def step(self, line: dict[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.step(line)

    def note(self, text: str) -> None:
        for reporter in self._reporters:
            reporter.note(text)

    def sample(self, step: int, prompt: str, text: str) -> None:
        for reporter in self._reporters:
            reporter.sample(step, prompt, text)

    def working(self, text: str) -> AbstractContextManager[object]:
        stack = ExitStack()
        for reporter in self._reporters:
            stack.enter_context(reporter.working(text))
        return stack

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()


def _numbers(config: Any) -> dict[str, Any]:
    """Return the fields of a config that are numbers or single words."""
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
