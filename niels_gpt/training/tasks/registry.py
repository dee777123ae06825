"""The tasks by name."""

from __future__ import annotations

from niels_gpt.config import RunConfig
from niels_gpt.training.tasks.base import (
    Batch,
    DataTask,
    RowOrigin,
    SourceRow,
    Task,
)
from niels_gpt.training.tasks.byte_task import (
    SOURCES,
    ByteTask,
    eval_name,
    open_byte_task,
    stream_config,
)
from niels_gpt.training.tasks.splice_task import SpliceTask
from niels_gpt.training.tasks.token_task import PretrainTask, SFTTask

__all__ = [
    "SOURCES",
    "Batch",
    "ByteTask",
    "DataTask",
    "PretrainTask",
    "RowOrigin",
    "SFTTask",
    "SourceRow",
    "SpliceTask",
    "Task",
    "eval_name",
    "open_byte_task",
    "open_task",
    "stream_config",
]


def open_task(config: RunConfig) -> DataTask:
    """The task of a config, its data loaded and checked."""
    if config.task == "bytes":
        return open_byte_task(config)
    if config.task == "splice":
        return SpliceTask(config)
    return PretrainTask(config) if config.task == "pretrain" else SFTTask(config)
