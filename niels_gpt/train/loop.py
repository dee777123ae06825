"""The one training loop. A task hands over batches; everything else is here.

Update s learns from batch s at the learning rate of step s; a checkpoint "of step s" holds the weights
after s updates, so that training goes on with batch s. Nothing else need be remembered: batches and
dropout are functions of (seed, step), and a resumed run is bit for bit the run that was not stopped.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from niels_gpt import files
from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.config_file import differences, to_dict, with_defaults
from niels_gpt.inference.sampling import Sampling
from niels_gpt.inference.text import stream_text
from niels_gpt.model.checkpoint import CheckpointError, load_weights, read_checkpoint
from niels_gpt.model.gpt import GPT
from niels_gpt.model.loss import loss_fn
from niels_gpt.rng import derive_seed, generator, set_seed
from niels_gpt.train.optimizer import make_optimizer
from niels_gpt.train.progress import Reporter, Silent
from niels_gpt.train.run_folder import MetricsLog, RunFolder
from niels_gpt.train.schedule import lr_at_step
from niels_gpt.train.task import Batch, Task, open_task


class TrainingDiverged(FloatingPointError):
    """The loss or the gradient became NaN or infinite."""


@dataclass
class Result:
    """How a run ended."""

    step: int
    """Updates done."""
    stopped_by: str | None = None
    """The signal that ended it early."""
    signal: str | None = None
    """The signal that came, also with the last update: the run is done then, and nothing shall follow it."""
    evals: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    best: dict[str, Any] | None = None
    """Step and validation loss of the best checkpoint."""


@dataclass
class _State:
    """What changes from update to update."""

    model: GPT
    optimizer: torch.optim.Optimizer
    step: int
    best: dict[str, Any] | None


def train(
    config: RunConfig,
    run: RunFolder,
    *,
    task: Task | None = None,
    device: str = "cpu",
    resume: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
    report: Reporter | None = None,
) -> Result:
    """Train from scratch, or go on from the newest checkpoint, until train.total_steps or a signal.

    Raises ValueError before any work for a config that does not fit, a folder that holds a run already
    (or none, to resume), other data or another config than the checkpoint's; TrainingDiverged for a NaN
    or infinite loss; OSError when the disk is full. What was saved before stays usable in every case.
    """
    report = report or Silent()
    lr_at_step(0, config.train.total_steps, warmup_steps=config.train.warmup_steps)  # refuses a long warm-up
    if resume and not run.exists:
        raise ValueError(f"nothing to resume: {run.path} is not a run (it has no config.yaml)")
    if run.exists and not resume:
        raise ValueError(f"{run.path} holds a run already: go on with --resume, or choose another --run-dir")
    task = open_task(config) if task is None else task
    with run.lock(), _signals() as caught:
        if run.exists and not resume:  # another process may have been here since
            raise ValueError(f"{run.path} holds a run already: go on with --resume, or choose another --run-dir")
        state = _start(config, device)
        if resume:
            _restore(state, config, task, run, device, allow_data_change, allow_config_change, report)
            run.keep_metrics_before(state.step)
        if config.init_from and state.step == 0:
            _initialise(state.model, config, task, device)
        run.write_config(config)
        run.write_tokenizer(task.tokenizer)
        log = MetricsLog(run.metrics_path)
        report.start(first=state.step, total=config.train.total_steps)
        try:
            return _loop(state, config, task, run, device, log, report, caught)
        finally:
            log.close()
            report.close()


def _start(config: RunConfig, device: str) -> _State:
    set_seed(derive_seed(config.train.seed, "init"))
    model = GPT(config.model).to(device)
    return _State(model, make_optimizer(model, config.train), step=0, best=None)


def _initialise(model: GPT, config: RunConfig, task: Task, device: str) -> None:
    """Take the weights of another run. Raises CheckpointError where they are of another model or tokenizer."""
    where = config.init_from
    saved = read_checkpoint(where, device)
    theirs, ours = to_dict(ModelConfig.of(saved["config"])), to_dict(config.model)
    for key in ("V", "C", "L", "H", "d_ff", "norm", "mlp", "positions"):
        if theirs[key] != ours[key]:
            raise CheckpointError(
                f"{where} is of another architecture: its model.{key} is {theirs[key]!r}, the config's {ours[key]!r}"
            )
    tokenizers = [data.get("tokenizer") for data in (saved["extra"].get("data", {}), task.fingerprint())]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:
        raise CheckpointError(f"{where} was trained with another tokenizer than that of {config.data.token_cache}")
    load_weights(model, saved["model"], where=where)


def _restore(
    state: _State,
    config: RunConfig,
    task: Task,
    run: RunFolder,
    device: str,
    allow_data_change: bool,
    allow_config_change: bool,
    report: Reporter,
) -> None:
    """Bring the state to the newest readable checkpoint. Raises ValueError where it is of another run."""
    path, saved, damaged = run.newest_checkpoint(device)
    for problem in damaged:
        report.note(f"warning: {problem}; going back to an older checkpoint")
    if path is None:
        report.note(f"{run.path} has no checkpoint yet: starting at step 0")
        return
    extra = saved["extra"]
    changed = differences(with_defaults(extra.get("config", {})), _identity(config))
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
    load_weights(state.model, saved["model"], where=str(path))
    fresh = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(saved["optimizer"])
    for group, settings in zip(state.optimizer.param_groups, fresh, strict=True):
        group.update(settings)  # those of this config: they may have been changed on purpose
    state.step = saved["step"]
    state.best = extra["best"] if run.best.exists() else None
    report.note(f"resuming {run.path} at step {state.step}")


def _identity(config: RunConfig) -> dict[str, Any]:
    """What a run is: the config without places and habits of output."""
    whole = to_dict(config)
    found = {key: whole[key] for key in ("task", "model", "train")}
    if config.task == "splice":
        found["splice"] = {key: value for key, value in whole["splice"].items() if key != "base"}
    return found


def _loop(
    state: _State,
    config: RunConfig,
    task: Task,
    run: RunFolder,
    device: str,
    log: MetricsLog,
    report: Reporter,
    caught: list[str],
) -> Result:
    total, out = config.train.total_steps, config.output
    fingerprint = task.fingerprint()
    evals: dict[str, float] = {}

    while state.step < total:
        line = _update(state, config, task, device, run)
        state.step += 1
        last, stopping = state.step == total, bool(caught)
        improved = False
        if last or state.step % out.eval_every == 0:
            evals, value = task.evaluate(state.model, device)
            if not math.isfinite(value):
                raise _diverged(run, state.step - 1, f"the validation loss became {value} after step {state.step - 1}")
            line["evals"] = evals
            improved = state.best is None or value < state.best["loss"]
            if improved:
                state.best = {"step": state.step, "loss": value}
        log.write(line)
        report.step(line)
        if last or (out.sample_every and state.step % out.sample_every == 0):
            _write_sample(state, config, task, run)
        due = last or stopping or state.step % out.checkpoint_every == 0
        if due:
            log.sync()
        extra = {"config": _identity(config), "data": fingerprint, "best": state.best}
        run.save(state.model, state.optimizer, state.step, extra, numbered=due, best=improved, keep=out.keep)
        if stopping and not last:
            return Result(state.step, stopped_by=caught[0], evals=evals, best=state.best, signal=caught[0])
    return Result(state.step, evals=evals, best=state.best, signal=caught[0] if caught else None)


def _update(state: _State, config: RunConfig, task: Task, device: str, run: RunFolder) -> dict[str, Any]:
    """One optimiser update; its line for metrics.jsonl. Raises TrainingDiverged before it can do harm."""
    began = time.perf_counter()
    settings, model = config.train, state.model
    lr = lr_at_step(
        state.step,
        settings.total_steps,
        base_lr=settings.base_lr,
        warmup_steps=settings.warmup_steps,
        min_lr=settings.min_lr,
    )
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    set_seed(derive_seed(settings.seed, "dropout", state.step))
    batch = task.batch(state.step, device)
    model.train()
    loss = _backward(model, batch, parts=settings.accumulate, precision=settings.precision)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        what = f"loss became {loss}" if not math.isfinite(loss) else f"gradient became {norm}"
        raise _diverged(run, state.step, f"the {what} at step {state.step} (learning rate {lr:g})")
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    line = {
        "step": state.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens_per_s": round(batch.x.numel() / seconds, 1),
    }
    if batch.segments is not None:  # the rest is filler
        line["supervised_per_s"] = round(int((batch.targets != -100).sum()) / seconds, 1)
    return line


def _diverged(run: RunFolder, step: int, what: str) -> TrainingDiverged:
    """The error for a run that broke at a step; good is a checkpoint from before it."""
    good = next((path for path in run.step_files() if run.step_path(step) > path), None)
    where = f"the last good checkpoint is {good}" if good else "there is no checkpoint from before"
    return TrainingDiverged(f"{what}; {where}. Try a lower train.base_lr or a longer warm-up")


def _backward(model: GPT, batch: Batch, *, parts: int, precision: str) -> float:
    """Add the gradient of the batch's mean loss over its targets, in `parts` forward passes; that loss."""

    def loss_of(part: Batch) -> torch.Tensor:
        with torch.autocast(part.x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            return loss_fn(model(part.x, **part.structure()), part.targets)

    if parts == 1:
        loss = loss_of(batch)
        loss.backward()
        return loss.item()
    total = (batch.targets != -100).sum()
    mean = 0.0
    for part in batch.parts(parts):
        number = (part.targets != -100).sum()
        if number:
            share = loss_of(part) * (number / total)
            share.backward()
            mean += share.item()
    return mean


def _write_sample(state: _State, config: RunConfig, task: Task, run: RunFolder) -> None:
    prompt = task.sample_prompt()
    pieces = stream_text(
        state.model,
        prompt,
        max_new_tokens=config.output.sample_tokens,
        sampling=Sampling(temperature=0.8),
        generator=generator(config.train.seed, "sample", state.step),
        tokenizer=task.tokenizer,
    )
    text = (prompt if isinstance(prompt, str) else config.output.sample_prompt) + "".join(pieces)
    files.write_text(run.samples / f"step_{state.step:08d}.txt", text + "\n")


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the SIGINT or SIGTERM that came; a second Ctrl-C interrupts at once."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
