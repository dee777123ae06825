"""What a run is between two updates, and how it comes back: from a checkpoint of its own, or from another's weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import differences, to_dict, with_defaults
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import (
    CheckpointError,
    check_weights,
    is_dense,
    load_weights,
    model_config,
    read_checkpoint,
)
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import files
from niels_gpt.system.processes import World
from niels_gpt.training.parallel.sharding import (
    fill,
    is_sharded,
    state_tensors,
    ties,
)
from niels_gpt.training.progress import Reporter
from niels_gpt.training.tasks.base import Task


@dataclass
class TrainState:
    """What changes from update to update."""

    model: GPT
    optimizer: torch.optim.Optimizer
    step: int = 0
    best: dict[str, Any] | None = None
    module: nn.Module | None = None
    """What several processes compute the loss with."""

    @property
    def sharded(self) -> bool:
        """Whether this process has only a part of the weights."""
        return any(map(is_sharded, self.model.parameters()))


def identity(config: RunConfig) -> dict[str, Any]:
    """What a run is: the config without places and habits of output."""
    whole = to_dict(config)
    found = {key: whole[key] for key in ("task", "model", "train")}
    if config.task == "splice":
        # Not what it is searched for either, which is text of the documents: a checkpoint may be published.
        found["splice"] = {key: value for key, value in whole["splice"].items() if key not in ("base", "doc_key")}
    return found


def sharded_content(state: TrainState, extra: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, what else there is) of a sharded checkpoint."""
    from niels_gpt.runs.sharded_checkpoint import without_tensors

    return state_tensors(state.model, state.optimizer), {
        "step": state.step,
        "config": to_dict(state.model.config),
        "extra": extra,
        "optimizer": without_tensors(state.optimizer.state_dict()),
        "tied": {f"model/{name}": f"model/{owner}" for name, owner in ties(state.model).items()},
    }


def initialize(state: TrainState, config: RunConfig, task: Task, device: str) -> None:
    """Take the weights of another run. Raises CheckpointError where they are of another model or tokenizer."""
    where = config.init_from
    saved = read_checkpoint(files.expand_home(where), "cpu" if state.sharded else device)
    theirs, ours = to_dict(model_config(saved["config"], where=where)), to_dict(config.model)
    for key in ("V", "C", "L", "H", "d_ff", "norm", "mlp", "positions", "n_kv_heads", "tie_embeddings", "rope_theta"):
        if theirs[key] != ours[key]:
            raise CheckpointError(
                f"{where} is of another architecture: its model.{key} is {theirs[key]!r}, the config's {ours[key]!r}"
            )
    tokenizers = [data.get("tokenizer") for data in (saved["extra"].get("data", {}), task.fingerprint())]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        raise CheckpointError(f"{where} was trained with another tokenizer than that of {config.data.token_cache}")
    _load_weights(state, saved["model"], where=where)


def restore(
    state: TrainState,
    config: RunConfig,
    task: Task,
    run: RunFolder,
    device: str,
    allow_data_change: bool,
    allow_config_change: bool,
    report: Reporter,
    world: World,
) -> None:
    """Bring the state to the newest readable checkpoint, which the main process finds.

    Raises ValueError where it is of another run, and CheckpointError where a run cannot go on from it; either before
    anything is changed. Called by all processes together.
    """
    where = "cpu" if state.sharded else device
    path: Path | None = None
    saved: dict[str, Any] = {}
    damaged: list[str] = []
    with world.together():
        if world.is_main:
            path, saved, damaged = run.newest_checkpoint(where, whole=not state.sharded)
    path, damaged = world.broadcast((path, damaged))
    for problem in damaged:
        report.note(f"warning: {problem}; going back to an older checkpoint")
    if path is None:
        report.note(f"{run.path} has no checkpoint yet: starting at step 0")
        return
    with world.together():
        if not world.is_main:
            saved = run.read(path, where, whole=not state.sharded, verify=False)
        _check(path, saved["extra"], config, task, allow_data_change, allow_config_change)
        if not (state.sharded and path.is_dir()):  # of a folder each process reads its parts, and torch compares them
            check_weights(state.model, saved["model"], where=str(path))
            saved["optimizer"] = optimizer_state(state, saved["optimizer"], where=str(path)) if saved["step"] else None
    if state.sharded:
        _fill(state, path, saved, world)
    else:
        load_weights(state.model, saved["model"], where=str(path))
        if saved["optimizer"] is not None:
            state.optimizer.load_state_dict(saved["optimizer"])
    state.step = saved["step"]
    state.best = saved["extra"]["best"] if run.best.exists() else None
    report.note(f"resuming {run.path} at step {state.step}")
    before = saved["extra"].get("processes", 1)
    if before != world.size:
        masks = ", with other dropout masks" if config.model.dropout else ""
        report.note(f"processes: it had {before}, now {world.size}; the same rows{masks}")


def _check(
    path: Path, extra: dict[str, Any], config: RunConfig, task: Task, allow_data_change: bool, allow_config_change: bool
) -> None:
    """Raise ValueError where a checkpoint is of another config or of other data, unless that is allowed."""
    _check_kinds(path, extra)
    changed = differences(with_defaults(extra["config"]), identity(config))
    changed.pop("train.accumulate", None)  # the same rows, summed in other parts
    changed.pop("splice.doc_key", None)  # the data says which documents it found
    model_changed = [key for key in changed if key.startswith(("model.", "task", "train.optimizer"))]
    if changed and (model_changed or not allow_config_change):
        listed = ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        remedy = (
            "start a new run for another model or optimizer"
            if model_changed
            else "use the config of the run, or pass --allow-config-change to go on all the same"
        )
        raise ValueError(f"the config has changed since {path}: {listed}; {remedy}")
    fingerprint = task.fingerprint()
    other = [name for name in {**extra["data"], **fingerprint} if extra["data"].get(name) != fingerprint.get(name)]
    if other and not allow_data_change:
        raise ValueError(
            f"the training data has changed since {path}: {', '.join(other)}; restore it, start a new run, "
            "or pass --allow-data-change to go on all the same"
        )


def _check_kinds(path: Path, extra: dict[str, Any]) -> None:
    """Raise CheckpointError where `extra` is not what a run writes beside the weights."""

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return isinstance(value, str | int | float | None)

    def has(entry: Any, **kinds: Any) -> bool:
        return isinstance(entry, dict) and plain(entry) and all(isinstance(entry.get(k), v) for k, v in kinds.items())

    config, data, best = (extra.get(name, "missing") for name in ("config", "data", "best"))
    parts = {"task": str, "model": dict, "train": dict, "splice": dict | None}
    fits = {
        "config": has(config, **parts) and config.keys() <= parts.keys(),
        "data": has(data) and all(isinstance(value, str) for value in data.values()),
        "best": best is None or has(best, step=int, loss=int | float),
        "processes": isinstance(extra.get("processes", 1), int),
    }
    for name, good in fits.items():
        if not good:
            raise CheckpointError(
                f"{path} is of no run that could go on: its extra has no {name}, or one of a wrong kind; "
                f"start a new run with --set init_from={path}"
            )


def optimizer_state(state: TrainState, saved: Any, *, where: str) -> dict[str, Any]:
    """What the optimiser can load: a saved state, with the settings of this config, which may be others on purpose.

    Raises CheckpointError where it is not that of these weights: torch would take it, and read past its end.
    """
    remedy = f"start a new run with --set init_from={where}"
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where} has no optimizer state, so a run cannot go on from it: {remedy}")
    names = {weight: name for name, weight in state.model.named_parameters()}
    weights = iter([weight for group in state.optimizer.param_groups for weight in group["params"]])
    own = state.optimizer.state_dict()
    alone = "param_groups" in own  # AdamW; else Muon and AdamW by name, each with weights of its own
    if alone:
        own, saved = {"adamw": own}, {"adamw": saved}
    found: dict[str, Any] = {}
    for kind, part in own.items():
        theirs = saved.get(kind)
        if _sizes(theirs) != _sizes(part) or not isinstance(theirs.get("state"), dict):
            raise CheckpointError(f"{where} has another optimizer's state, not that of {kind}: {remedy}")
        found[kind] = {"state": {}, "param_groups": part["param_groups"]}
        for number in chain.from_iterable(group["params"] for group in part["param_groups"]):
            weight, given = next(weights), theirs["state"].get(number)
            for key, like in _moments(kind, weight).items():
                value: Any = given.get(key) if isinstance(given, dict) else None
                fits = is_dense(value) and value.is_contiguous()
                if not fits or (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise CheckpointError(
                        f"{where} has optimizer state of another model: {key} of {names[weight]} is missing, or is not "
                        f"{like.dtype} of shape {tuple(like.shape)}; {remedy}"
                    )
                found[kind]["state"].setdefault(number, {})[key] = value
    return found["adamw"] if alone else found


def _sizes(saved: Any) -> list[int] | None:
    """How many weights there are in each group of an optimiser's state; None where it is no such state."""
    try:
        return [len(group["params"]) for group in saved["param_groups"]]
    except (LookupError, TypeError):
        return None


def _moments(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimiser keeps of a weight, as tensors of the same shape and dtype."""
    if kind == "muon":
        return {"momentum_buffer": weight}
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": weight, "exp_avg_sq": weight}


def _load_weights(state: TrainState, weights: dict[str, torch.Tensor], *, where: str) -> None:
    """Whole weights into the model, of which this process may have only a part."""
    if state.sharded:
        check_weights(state.model, weights, where=where)
        fill(state.model.state_dict(), weights)
    else:
        load_weights(state.model, weights, where=where)


def _fill(state: TrainState, path: Path, saved: dict[str, Any], world: World) -> None:
    """A checkpoint into a sharded state: from a folder each process reads its parts, of a .pt it keeps them."""
    from niels_gpt.runs.sharded_checkpoint import fill_from_folder, flat

    if path.is_dir():
        fill_from_folder(path, state_tensors(state.model, state.optimizer), group=world.control)
    elif saved["optimizer"] is None:
        _load_weights(state, saved["model"], where=str(path))
    else:
        tensors = state_tensors(state.model, state.optimizer)
        fill(tensors, flat({key: saved[key] for key in ("model", "optimizer")}))
