"""Options that a run would accept without an effect: its task does not read them, or this machine cannot use them."""

from __future__ import annotations

import dataclasses
from typing import Any

from niels_gpt.config.schema import RunConfig
from niels_gpt.system.console import plural

_READ_BY = {
    "data.token_cache": ("pretrain", "sft", "splice over tokens"),
    "data.retain": ("pretrain", "sft"),
}
"""Option -> tasks that read it; those of `splice` are read by splice alone, and all others by every task.

Not listed, because configs of several tasks share them: `train.p_train`, `train.p_val` and `output.eval_steps`, which
splice does not read, and `data.cache_dir`, which tasks over token caches do not. A pipeline has one section `data` for
its phases, so pretrain accepts `data.retain`. For tasks over token caches the other options of `data` say what the
caches were built from: the audit, `eval` and the commands that are printed use it.
"""


def check_used(config: RunConfig, default: RunConfig, *, device: str, processes: int) -> None:
    """Raise ValueError that names every option of a new run which differs from `default` and would have no effect.

    default: the config of the same task without options, with its paths resolved as in `config`.
    """
    task = config.task
    name = f"splice over {config.splice.documents}" if task == "splice" else task
    unused = {
        f"splice.{option}": "task splice reads it"
        for option in _changed(config.splice, default.splice)
        if task != "splice"
    }
    for key, tasks in _READ_BY.items():
        section, _, option = key.partition(".")
        if name not in tasks and option in _changed(getattr(config, section), getattr(default, section)):
            unused[key] = f"read by task {' and '.join(tasks)}"
    if config.engine.graphs and (device.partition(":")[0] != "cuda" or processes > 1):
        unused["engine.graphs=true"] = (
            f"a single CUDA device is needed, here {plural(processes, 'process')} on {device}"
        )
    if config.engine.shard and processes == 1:
        unused["engine.shard=true"] = "several processes are needed (torchrun), here is one"
    if unused:
        listed = "; ".join(f"{key} ({why})" for key, why in unused.items())
        raise ValueError(f"without effect for task {name}: {listed}: remove what is not used, or choose another task")


def _changed(section: Any, default: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != getattr(default, field.name)
    ]
