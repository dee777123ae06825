"""Open the data that a run was trained on."""

from __future__ import annotations

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import check_unchanged
from niels_gpt.training.tasks.base import DataTask
from niels_gpt.training.tasks.registry import open_task


def open_trained_data(run: RunFolder) -> tuple[RunConfig, DataTask]:
    """The config of a run and its task, whose batches are those of the run.

    Raises ValueError if the data has changed since the run was trained, or the run has none.
    """
    run.check_data()
    config = run.read_config()
    task = open_task(config)
    trained_on = run.newest_checkpoint("cpu")[1].get("extra", {}).get("data", {})
    check_unchanged(task.fingerprint(), trained_on, str(run.path))
    return config, task
