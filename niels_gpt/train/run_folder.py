"""The folder of a run: config.yaml, metrics.jsonl, checkpoints/, samples/, loss.png."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from niels_gpt import files
from niels_gpt.config import RunConfig
from niels_gpt.config_file import dump_config, load_config
from niels_gpt.model.checkpoint import CheckpointError, read_checkpoint, save_checkpoint
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, Tokenizer


class RunFolder:
    """Paths and files of one run. Everything in it can be read without this package."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.plot_path = self.path / "loss.png"
        self.tokenizer_path = self.path / "tokenizer.model"

    @property
    def exists(self) -> bool:
        return self.config_path.exists()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing. Raises ValueError while another process trains into it."""
        try:
            with files.lock(self.path / "run.lock", wait=False):
                for folder in (self.checkpoints, self.samples):
                    folder.mkdir(parents=True, exist_ok=True)
                    files.remove_leftovers(folder)
                yield
        except BlockingIOError:
            raise ValueError(
                f"another process is training into {self.path}: wait for it, or use another --run-dir"
            ) from None

    def write_config(self, config: RunConfig) -> None:
        files.write_text(self.config_path, dump_config(config))

    def write_tokenizer(self, tokenizer: AnyTokenizer) -> None:
        """A copy of the tokenizer, so that the run can be used by itself; bytes need none."""
        if isinstance(tokenizer, Tokenizer):
            files.write_bytes(self.tokenizer_path, tokenizer.model)

    def read_config(self) -> RunConfig:
        """Raises ValueError where there is no run."""
        if not self.exists:
            raise ValueError(f"{self.path} is not a run: it has no config.yaml")
        return load_config(self.config_path)

    # --- metrics ---------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one that a kill has torn is left out."""
        lines = []
        if self.metrics_path.exists():
            for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    lines.append(json.loads(line))
        return lines

    def keep_metrics_before(self, step: int) -> None:
        """Drop the lines of steps that will be run again."""
        kept = [m for m in self.metrics() if m["step"] < step]
        files.write_text(self.metrics_path, "".join(json.dumps(m) + "\n" for m in kept))

    # --- checkpoints -----------------------------------------------------------------------------

    def step_path(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}.pt"

    @property
    def latest(self) -> Path:
        return self.checkpoints / "latest.pt"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.pt"

    def step_files(self) -> list[Path]:
        """The numbered checkpoints, newest first."""
        return sorted(self.checkpoints.glob("step_*.pt"), reverse=True)

    def save(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        step: int,
        extra: dict[str, Any],
        *,
        numbered: bool,
        best: bool,
        keep: int,
    ) -> None:
        """Write the checkpoint of a step as a numbered one, as the best one, or both.

        `latest` moves last: after a kill in between, resume begins before this step and does it again.
        Of the numbered ones the newest `keep` stay.
        """
        path = self.step_path(step) if numbered else self.best
        if numbered or best:
            save_checkpoint(path, model, optimizer, step, model.config, extra=extra)
        if numbered:
            if best:
                files.link(path, self.best)
            files.link(path, self.latest)
            for old in self.step_files()[keep:]:
                old.unlink(missing_ok=True)

    def newest_checkpoint(self, device: str) -> tuple[Path | None, dict[str, Any], list[str]]:
        """(path, content, warnings) of the newest checkpoint that can be read; (None, {}, []) if there is none.

        A damaged one is passed over and named in the warnings. Raises CheckpointError if all are damaged.
        """
        candidates = [p for p in (self.latest, *self.step_files()) if p.exists()]
        damaged: list[str] = []
        for path in candidates:
            try:
                return path, read_checkpoint(path, device), damaged
            except CheckpointError as err:
                damaged.append(str(err))
        if damaged:
            raise CheckpointError(f"no checkpoint of {self.path} can be read: {damaged[0]}")
        return None, {}, []

    def model_path(self) -> Path:
        """The checkpoint to use: the best, else the latest. Raises ValueError where there is none."""
        for path in (self.best, self.latest):
            if path.exists():
                return path
        raise ValueError(f"{self.path} has no checkpoint yet: train first (niels-gpt train --run-dir {self.path})")


class MetricsLog:
    """Appends lines to metrics.jsonl; each is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make all lines durable; called with every checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
