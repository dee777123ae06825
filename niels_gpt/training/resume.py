"""The state of a run between two steps, and restoring it from a checkpoint or from another run's weights."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from niels_gpt.config import RunConfig
from niels_gpt.config.schema import default_warmup
from niels_gpt.config.yaml_file import differences, to_dict, with_defaults
from niels_gpt.data.note_record import check_notes
from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import base_state
from niels_gpt.pretrained.initial_weights import open_initial
from niels_gpt.runs.checkpoint import CheckpointError, check_weights, is_dense
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import files
from niels_gpt.system.console import plural
from niels_gpt.system.processes import World
from niels_gpt.system.program import command
from niels_gpt.system.urls import is_url
from niels_gpt.training.optim.schedule import ramp_steps, scheduled_lr
from niels_gpt.training.parallel.sharding import fill, is_sharded, state_tensors, ties
from niels_gpt.training.progress import Reporter
from niels_gpt.training.tasks.base import Task
from niels_gpt.training.tasks.documents import uses_bytes
from niels_gpt.training.tasks.token_caches import build_command


@dataclass
class TrainState:
    """What changes from step to step."""

    model: GPT
    optimizer: torch.optim.Optimizer
    step: int = 0
    best: dict[str, Any] | None = None
    module: nn.Module | None = None
    """The DDP or FSDP module whose forward is the loss; None for a single process."""
    base: str = ""
    """The digest of the frozen weights of a LoRA run."""
    data_changed: int = 0
    """Steps that were done before the run was first resumed with other data."""

    @property
    def sharded(self) -> bool:
        """Whether this process holds only a shard of the weights."""
        return any(map(is_sharded, self.model.parameters()))


class Origin(NamedTuple):
    """Where the initial weights of a run came from."""

    step: int
    """The step of their checkpoint."""
    data: dict[str, str]
    """Hashes of the data that they were trained on."""


def identity(config: RunConfig) -> dict[str, Any]:
    """The part of a config that a resumed run must share: no paths and no output settings."""
    full = to_dict(config)
    shared = {key: full[key] for key in ("task", "model", "train")}
    if config.task == "splice":
        # doc_key is text of the documents: leave it out, because a checkpoint may be published. total_steps has epochs.
        left_out = ("base", "tokenizer", "doc_key", "epochs")
        shared["splice"] = {key: value for key, value in full["splice"].items() if key not in left_out}
    return shared


def sharded_content(state: TrainState, extra: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, everything else) of a sharded checkpoint."""
    from niels_gpt.runs.sharded_checkpoint import without_tensors

    return state_tensors(state.model, state.optimizer), {
        "step": state.step,
        "config": to_dict(state.model.config),
        "extra": extra,
        "optimizer": without_tensors(state.optimizer.state_dict()),
        "tied": {f"model/{name}": f"model/{owner}" for name, owner in ties(state.model).items()},
    }


def initialize(state: TrainState, config: RunConfig, task: Task, device: str) -> Origin:
    """Load the weights of init_from. Raises CheckpointError if they belong to another model or tokenizer."""
    where, device = config.init_from, "cpu" if state.sharded else device
    initial = open_initial(where, device)
    theirs_and_ours = [data.get("tokenizer") for data in (initial.data, task.fingerprint())]
    if None not in theirs_and_ours and theirs_and_ours[0] != theirs_and_ours[1]:
        raise CheckpointError(
            f"{where} was trained with a different tokenizer than that of {config.data.token_cache}: build caches with "
            f"its tokenizer ({build_command(config, cache_dir='CACHE')}) and set data.token_cache"
        )
    theirs, ours = to_dict(initial.config), to_dict(config.model)
    for key in theirs:
        if key not in ("T", "dropout") and theirs[key] != ours[key]:
            raise CheckpointError(
                f"{where} has a different architecture: its model.{key} is {theirs[key]!r}, the config's {ours[key]!r}"
            )
    weights = dict(initial.read())
    check_weights(base_state(state.model), weights, where=where)
    fill(base_state(state.model), weights)
    return Origin(initial.step, dict(initial.data))


def check_notes_read(config: RunConfig, run: Path, *, keep: bool) -> list[str]:
    """Compare the notes that a run was made of with their folder; see `check_notes`."""
    if uses_bytes(config):
        new = command("train", "--config", run / "config.yaml", "--run-dir", "NEW")
        return check_notes(run, start_over=new, keep=keep)
    location = config.splice.base or config.data.token_cache
    if is_url(location):
        return []
    new = f"{build_command(config)} and a new run"
    return check_notes(files.expand_home(location), start_over=new, keep=keep)


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
) -> RunConfig:
    """Load the newest readable checkpoint, which the main process finds. A collective call.

    Returns the config with the history of its total_steps (`with_saved_schedule`).

    Raises ValueError if the checkpoint has another config or other data, and CheckpointError if it cannot be resumed
    from; both before anything changes.
    """
    read_to = "cpu" if state.sharded else device
    path: Path | None = None
    saved: dict[str, Any] = {}
    damaged: list[str] = []
    with world.fail_together():
        if world.is_main:
            with contextlib.suppress(ValueError):  # config.yaml is damaged, but the caller has a config
                run.read_config()  # warns of changes
            path, saved, damaged = run.newest_checkpoint(read_to, tensors=not state.sharded, merge=False)
    path, damaged = world.broadcast((path, damaged))
    for problem in damaged:
        report.note(f"warning: {problem}; trying an older checkpoint")
    if path is None:
        report.note(f"{run.path} has no checkpoint yet: starting at step 0")
        return config
    with world.fail_together():
        if not world.is_main:
            saved = run.read(path, read_to, tensors=not state.sharded, verify=False, merge=False)
        config = with_saved_schedule(config, path, saved)
        check_resumable(
            path,
            saved["extra"],
            config,
            task,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
        )
        if not (state.sharded and path.is_dir()):  # else torch checks the shards that each process reads
            check_weights(state.model.state_dict(), saved["model"], where=str(path))
            saved["optimizer"] = optimizer_state(state, saved["optimizer"], where=str(path)) if saved["step"] else None
    if state.sharded:
        _fill_sharded(state, path, saved, world)
    else:
        fill(state.model.state_dict(), saved["model"])
        if saved["optimizer"] is not None:
            state.optimizer.load_state_dict(saved["optimizer"])
    state.step = saved["step"]
    state.base = saved["extra"].get("lora", {}).get("base", "")
    changed = saved["extra"]["data"] != task.fingerprint()
    state.data_changed = saved["extra"].get("data_changed") or changed * state.step
    if world.is_main:
        run.restore_links(path, saved["step"], saved["extra"]["best"])
    state.best = world.broadcast(saved["extra"]["best"] if run.best.exists() else None)
    report.note(f"resuming {run.path} at step {state.step}")
    _report_schedule(config, saved, report)
    before = saved["extra"].get("processes", 1)
    if before != world.size:
        masks = ", the dropout masks do not" if config.model.dropout else ""
        report.note(f"the number of processes changed from {before} to {world.size}; the rows stay the same{masks}")
    return config


def with_saved_schedule(config: RunConfig, path: Path, saved: dict[str, Any]) -> RunConfig:
    """The config of a run that is resumed from a checkpoint, with the history of its total_steps in train.extended.

    A change of total_steps is added to it. If the config already has the change (the run was stopped before the next
    checkpoint), it stays. Raises ValueError if more steps are done than total_steps.
    """
    _check_types(path, saved["extra"])
    ours, theirs, step = config.train, with_defaults(saved["extra"]["config"])["train"], saved["step"]
    total, history = theirs["total_steps"], tuple((at, before) for at, before in theirs["extended"])
    if ours.total_steps < step:
        raise ValueError(
            f"{path} has done {step} steps, more than train.total_steps={ours.total_steps}: "
            f"give the number of all steps, the {step} included (niels-gpt train --resume --steps N)"
        )
    added = ours.extended[len(history) :]
    if added and ours.extended[: len(history)] == history and added[0][1] == total and added[0][0] >= step:
        return config
    warmup = ours.warmup_steps
    if ours.total_steps != total:
        history += ((step, total),) if step else ()
        if warmup == default_warmup(ours.total_steps):  # not set: it belongs to the steps that are done
            warmup = theirs["warmup_steps"]
    return dataclasses.replace(config, train=dataclasses.replace(ours, extended=history, warmup_steps=warmup))


def _report_schedule(config: RunConfig, saved: dict[str, Any], report: Reporter) -> None:
    """Report what a change of total_steps does to the learning rate."""
    train, before = config.train, saved["extra"]["config"]["train"]["total_steps"]
    if train.total_steps == before or not train.extended:
        return
    at, total = train.extended[-1][0], train.total_steps
    ramp = ramp_steps(at, total)
    change = ""
    if ramp:
        rates = [scheduled_lr(step, train) for step in (at - 1, at + ramp)]
        change = f"goes from {rates[0]:.3g} to {rates[1]:.3g} in {plural(ramp, 'step')}, then "
    report.note(f"{before} steps become {total}: the learning rate {change}follows the cosine of {total} steps")


def check_resumable(
    path: Path,
    extra: dict[str, Any],
    config: RunConfig,
    task: Task,
    *,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
) -> None:
    """Raise ValueError if a checkpoint has another config or other data, unless that is allowed."""
    _check_types(path, extra)
    changed = differences(with_defaults(extra["config"]), identity(config))
    # The same rows in other micro-batches; and the schedule follows: `with_saved_schedule`.
    for key in ("train.accumulate", "train.total_steps", "train.extended"):
        changed.pop(key, None)
    # The fingerprint of the data covers the choice of documents.
    for key in ("doc_key", "tokenizer", "epochs", "max_train_batches", "initial_batch_size"):
        changed.pop(f"splice.{key}", None)
    model_changed = [key for key in changed if key.startswith(("model.", "task", "train.optimizer", "train.lora"))]
    if changed and (model_changed or not allow_config_change):
        listed = ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        remedy = (
            "start a new run for another model, optimizer or adapters"
            if model_changed
            else "use the config of the run, or pass --allow-config-change to train to resume anyway"
        )
        raise ValueError(f"the config has changed since {path}: {listed}; {remedy}")
    differing = sorted(dict(extra["data"].items() ^ task.fingerprint().items()))
    if differing and not allow_data_change:
        raise ValueError(
            f"the training data has changed since {path}: {', '.join(differing)}; restore it, start a new run, "
            "or pass --allow-data-change to train to resume anyway"
        )


def _check_types(path: Path, extra: dict[str, Any]) -> None:
    """Raise CheckpointError if a field of `extra` that a run needs is missing or has the wrong type."""

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return isinstance(value, str | int | float | None)

    def has(entry: Any, **kinds: Any) -> bool:
        return isinstance(entry, dict) and plain(entry) and all(isinstance(entry.get(k), v) for k, v in kinds.items())

    config, data, best = (extra.get(name, "missing") for name in ("config", "data", "best"))
    sections = {"task": str, "model": dict, "train": dict, "splice": dict | None}
    valid = {
        "config": has(config, **sections) and config.keys() <= sections.keys(),
        "data": has(data) and all(isinstance(value, str) for value in data.values()),
        "best": best is None or has(best, step=int, loss=int | float),
        "processes": isinstance(extra.get("processes", 1), int),
    }
    for name, good in valid.items():
        if not good:
            raise CheckpointError(
                f"cannot resume from {path}: its field extra.{name} is missing or has the wrong type; "
                f"start a new run with {command('train', '--set', f'init_from={path}')}"
            )


def optimizer_state(state: TrainState, saved: Any, *, where: str) -> dict[str, Any]:
    """A saved optimizer state, checked against the model, with the hyperparameters of the current config.

    Raises CheckpointError if it does not belong to these weights: torch would load it, and read past its end.
    """
    remedy = f"start a new run with {command('train', '--set', f'init_from={where}')}"
    if not isinstance(saved, dict):
        raise CheckpointError(f"cannot resume from {where}: it has no optimizer state; {remedy}")
    names = {weight: name for name, weight in state.model.named_parameters()}
    weights = iter([weight for group in state.optimizer.param_groups for weight in group["params"]])
    current = state.optimizer.state_dict()
    adamw_only = "param_groups" in current  # else {"muon": ..., "adamw": ...}
    if adamw_only:
        current, saved = {"adamw": current}, {"adamw": saved}
    checked: dict[str, Any] = {}
    for kind, ours in current.items():
        theirs = saved.get(kind)
        if _group_sizes(theirs) != _group_sizes(ours) or not isinstance(theirs.get("state"), dict):
            raise CheckpointError(f"{where} does not hold the optimizer state of {kind}: {remedy}")
        checked[kind] = {"state": {}, "param_groups": ours["param_groups"]}
        for number in chain.from_iterable(group["params"] for group in ours["param_groups"]):
            weight, entry = next(weights), theirs["state"].get(number)
            for key, like in _moments(kind, weight).items():
                value: Any = entry.get(key) if isinstance(entry, dict) else None
                fits = is_dense(value) and value.is_contiguous()
                if not fits or (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise CheckpointError(
                        f"{where} holds the optimizer state of another model: {key} of {names[weight]} is missing or "
                        f"is not {like.dtype} of shape {tuple(like.shape)}; {remedy}"
                    )
                checked[kind]["state"].setdefault(number, {})[key] = value
    return checked["adamw"] if adamw_only else checked


def _group_sizes(saved: Any) -> list[int] | None:
    """The number of weights in each parameter group of an optimizer state; None if it is not one."""
    try:
        return [len(group["params"]) for group in saved["param_groups"]]
    except (LookupError, TypeError):
        return None


def _moments(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state tensors of a weight by name, each given by a tensor of the same shape and dtype."""
    if kind == "muon":
        return {"momentum_buffer": weight}
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": weight, "exp_avg_sq": weight}


def _fill_sharded(state: TrainState, path: Path, saved: dict[str, Any], world: World) -> None:
    """Load a checkpoint into a sharded state: each process reads its shards of a folder, or takes them from a .pt."""
    from niels_gpt.runs.sharded_checkpoint import fill_from_folder, flat

    if path.is_dir():
        fill_from_folder(path, state_tensors(state.model, state.optimizer), group=world.control)
    elif saved["optimizer"] is None:
        fill(state.model.state_dict(), saved["model"])
    else:
        tensors = state_tensors(state.model, state.optimizer)
        fill(tensors, flat({key: saved[key] for key in ("model", "optimizer")}))
