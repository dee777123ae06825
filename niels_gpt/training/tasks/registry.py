"""The task of a config."""

from __future__ import annotations

import contextlib
from typing import Any

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.remote import local_folder
from niels_gpt.cache.sources.texts import is_of_package
from niels_gpt.config import RunConfig
from niels_gpt.data.registry import PACKAGE, YOURS, licence_of
from niels_gpt.data.source_paths import source_name
from niels_gpt.training.tasks.base import DataTask
from niels_gpt.training.tasks.byte_task import open_byte_task
from niels_gpt.training.tasks.documents import uses_bytes
from niels_gpt.training.tasks.initial_model import with_initial_model
from niels_gpt.training.tasks.splice_task import SpliceTask, with_steps_of_epochs, with_training_subset
from niels_gpt.training.tasks.token_task import PretrainTask, SFTTask, with_vocabulary


def with_derived_values(
    config: RunConfig, *, resume: bool = False, stored: RunConfig | None = None, notes: list[str] | None = None
) -> RunConfig:
    """The config with what follows from init_from, its data and steps: the model, model.V, train.total_steps if
    splice.epochs is set, and the batches of splice.restrict_to_training_subset.

    `resume`: the config is that of a run, and init_from may be gone. `stored`: the config of the run that is resumed.
    `notes`: a line is appended for each value that is replaced.

    Raises CacheError if a token cache is missing, ValueError if the documents cannot be chosen.
    """
    config = with_vocabulary(config if resume else with_initial_model(config, notes), resume=resume)
    return with_steps_of_epochs(with_training_subset(config, stored), notes)


def open_task(config: RunConfig) -> DataTask:
    """The task of a config, with its data loaded and checked."""
    if config.task == "bytes":
        return open_byte_task(config)
    if config.task == "splice":
        return SpliceTask(config)
    return PretrainTask(config) if config.task == "pretrain" else SFTTask(config)


def sources_with_licences(task: DataTask, config: RunConfig) -> list[dict[str, Any]]:
    """The rows of `task.describe()` as dicts, with the licence of each source: what a run records of its data."""
    return [{**row._asdict(), "licence": licence_in(config, source_name(row.source))} for row in task.describe()]


def licence_in(config: RunConfig, source: str) -> str:
    """The licence of a source of a run; "" if it is not known."""
    if source in ("roam", "primer") and not uses_bytes(config):  # a cache may hold others than those of the config
        location = config.splice.base or config.data.token_cache
        with contextlib.suppress(CacheError, OSError):  # gone: it proves nothing
            if is_of_package(local_folder(location) / ("sft" if config.task == "sft" else "pretrain") / source):
                return PACKAGE
        return YOURS
    return licence_of(source, config.data)
