"""The folder of a pipeline: a pretrain run, an sft run that continues it, and the config of each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.stored_config import read_stored_config, write_stored_config
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json

PHASES = ("pretrain", "sft")
OPTIONS_FILE = "options.json"
"""What `notes` was asked for, written before it reads anything: it is resumed with the same options."""
CACHE = "cache"
"""Folder of a pipeline with the dialogues, tokenizer and token caches that were made for it."""
TOPICS = "topics.txt"
"""File in that folder: the topics of the notes that the model was taught to answer about, one per line."""
_FIRST_FILE = "dialogues.jsonl"
"""What is written into it first, before there is a run or a pretrain.yaml."""


class PipelineFolder:
    """The runs `pretrain/` and `sft/` of a pipeline, and their configs `pretrain.yaml` and `sft.yaml`.

    Both configs are stored before the first run starts, so that the second phase can be resumed without options.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = {name: RunFolder(path / name) for name in PHASES}

    @property
    def exists(self) -> bool:
        """Whether the folder holds a pipeline: it has a pretrain.yaml."""
        return self._config_path("pretrain").exists()

    @property
    def current(self) -> RunFolder:
        """The run to use where a single run is expected: sft, or pretrain while sft has no checkpoint."""
        pretrain, sft = self.runs["pretrain"], self.runs["sft"]
        return pretrain if pretrain.has_checkpoint and not sft.has_checkpoint else sft

    @property
    def trained(self) -> list[RunFolder]:
        """Its runs with a checkpoint, the last phase first."""
        return [run for run in reversed(self.runs.values()) if run.has_checkpoint]

    def read_configs(self) -> dict[str, RunConfig]:
        """Return the stored configs. Raises ValueError if there are none."""
        if not self.exists:
            raise ValueError(f"nothing to resume: {self.path} holds no pipeline (it has no pretrain.yaml)")
        return {name: read_stored_config(self._config_path(name)) for name in PHASES}

    def write_configs(self, phases: Mapping[str, RunConfig]) -> None:
        """Store the configs of both phases."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, phase in phases.items():
            write_stored_config(self._config_path(name), phase)

    def write_options(self, options: Mapping[str, Any]) -> None:
        """Store the options of `notes`. Only the owner can read them: they name private files."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_checked_json(self.path / OPTIONS_FILE, dict(options), mode=0o600)

    def read_options(self) -> dict[str, Any]:
        """Return the stored options of `notes`; empty if there are none. Raises ValueError if they are damaged."""
        path = self.path / OPTIONS_FILE
        try:
            return read_checked_json(path) if path.exists() else {}
        except DamagedJSON as err:
            raise ValueError(f"{path} is damaged ({err}): restore it, or start over in another folder") from None

    def forget_options(self) -> None:
        """Remove the stored options of a model that was never begun, and the folder if it is then empty."""
        if [entry.name for entry in files.matching(self.path, "*")] == [OPTIONS_FILE]:
            (self.path / OPTIONS_FILE).unlink()
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _config_path(self, phase: str) -> Path:
        return self.path / f"{phase}.yaml"


def pipeline_of(path: Path) -> Path | None:
    """Return the folder of the pipeline that a run is a phase of; None if it is not part of one."""
    return path.parent if path.name in PHASES and (path.parent / "pretrain.yaml").is_file() else None


def holds_caches(path: Path) -> bool:
    """Whether a folder is a pipeline, also one that was stopped before its training began."""
    return any((path / name).is_file() for name in ("pretrain.yaml", f"{CACHE}/{_FIRST_FILE}", OPTIONS_FILE))
