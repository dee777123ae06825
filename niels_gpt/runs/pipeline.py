"""The folder of a pipeline: a pretrain run, an sft run that continues it, and the config of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.stored_config import read_stored_config, write_stored_config

PHASES = ("pretrain", "sft")


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

    def _config_path(self, phase: str) -> Path:
        return self.path / f"{phase}.yaml"
