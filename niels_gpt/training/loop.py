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
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from niels_gpt.config import RunConfig
from niels_gpt.inference.generation import stream_text
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.folder import MetricsLog, RunFolder
from niels_gpt.system import files
from niels_gpt.system.device import check_precision
from niels_gpt.system.processes import SINGLE_PROCESS, World
from niels_gpt.system.rng import derive_seed, generator, set_seed
from niels_gpt.training.memory_limits import (
    OutOfMemory,
    check_size,
    reporting_out_of_memory,
    weights_text,
)
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.optim.schedule import lr_at_step
from niels_gpt.training.parallel.agreement import check_rows, check_same
from niels_gpt.training.parallel.sharding import spread, whole_model
from niels_gpt.training.prefetch import Prefetcher
from niels_gpt.training.progress import Reporter, Silent
from niels_gpt.training.resume import (
    TrainState,
    identity,
    initialize,
    restore,
    sharded_content,
)
from niels_gpt.training.step import StepRunner, deterministic, first_line
from niels_gpt.training.tasks.registry import Batch, Task, open_task
from niels_gpt.training.throughput import ThroughputMeter, flops_per_token


class TrainingDiverged(FloatingPointError):
    """The loss or the gradient became NaN or infinite."""


class DeviceFailed(ValueError):
    """A GPU gave up in mid-run: a fault of its own, of its driver, or of a kernel."""

    leave_at_once = True
    """For a command: freeing what lies on the device would end the process with a page of addresses."""


@dataclass
class TrainResult:
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


def train(
    config: RunConfig,
    run: RunFolder,
    *,
    task: Task | None = None,
    device: str = "cpu",
    world: World = SINGLE_PROCESS,
    resume: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
    report: Reporter | None = None,
) -> TrainResult:
    """Train from scratch, or go on from the newest checkpoint, until train.total_steps or a signal.

    Several processes call it together, each with its `world`; only the main one writes and reports.

    Raises ValueError before any work for a config that does not fit, a folder that holds a run already
    (or none, to resume), other data or another config than the checkpoint's; TrainingDiverged for a NaN
    or infinite loss; DeviceFailed where a GPU gives up; OSError when the disk is full. What was saved before stays
    usable in every case, and a new run that ends in ValueError before its first update leaves the folder free.
    """
    report = report if report is not None and world.is_main else Silent()
    with world.together():
        check_start(config, run, device=device, world=world, resume=resume)
    if task is None:
        task = world.in_turn(lambda: open_task(config))
    check_same(config, task.fingerprint(), {"--run-dir": str(run.path), "--resume": resume}, world)
    with contextlib.ExitStack() as held:
        with world.together():
            if world.is_main:
                held.enter_context(run.lock())
                _check_folder(run, resume)  # another process may have been here since
        held.enter_context(deterministic(config.engine.deterministic, device))
        caught = held.enter_context(_signals())
        with reporting_out_of_memory(f"a model of {weights_text(config.model)} on {device}: take a smaller one"):
            state = _start(config, device, world)
            if resume:
                restore(state, config, task, run, device, allow_data_change, allow_config_change, report, world)
            with world.together():
                if config.init_from and state.step == 0:
                    initialize(state, config, task, device)
        with world.together():
            engine = StepRunner(
                state.model, state.optimizer, config, device, world=world, module=state.module, note=report.note
            )
            log = None
            if world.is_main:
                if resume:
                    run.keep_metrics_before(state.step)
                run.write_config(config)
                run.write_tokenizer(task.tokenizer)
                log = held.enter_context(contextlib.closing(MetricsLog(run.metrics_path)))
        report.start(first=state.step, total=config.train.total_steps)
        held.callback(report.close)
        try:
            with _on(device, state, run):
                return _loop(state, config, task, run, device, engine, world, log, report, caught)
        except ValueError:
            if world.is_main and state.step == 0 and not resume:
                run.release()
            raise


@contextlib.contextmanager
def _on(device: str, state: TrainState, run: RunFolder) -> Iterator[None]:
    """Raise DeviceFailed where the device does, with how to go on."""
    try:
        yield
    except torch.AcceleratorError as err:
        newest = next(iter(run.step_files()), None)
        then = f"go on from {newest} with --resume" if newest else "nothing had been saved yet"
        raise DeviceFailed(f"{device} failed after {state.step} updates ({first_line(err)}): {then}") from err


def check_start(
    config: RunConfig, run: RunFolder, *, device: str, world: World = SINGLE_PROCESS, resume: bool = False
) -> None:
    """Raise ValueError for a run that cannot begin, as far as that is known without its data."""
    lr_at_step(0, config.train.total_steps, warmup_steps=config.train.warmup_steps)  # refuses a long warm-up
    check_rows(config, world)
    check_precision(config.train.precision, device)
    check_size(config, processes=world.size)
    if config.init_from and not resume and not files.expand_home(config.init_from).exists():
        raise ValueError(f"init_from: no checkpoint {config.init_from}")
    if world.is_main:
        _check_folder(run, resume)


def _check_folder(run: RunFolder, resume: bool) -> None:
    files.check_output_path(run.path, "--run-dir", folder=True)
    if resume and not run.exists:
        raise ValueError(f"nothing to resume: {run.path} is not a run (it has no config.yaml)")
    if run.exists and not resume:
        raise ValueError(f"{run.path} holds a run already: go on with --resume, or choose another --run-dir")
    if (left := run.remains()) is not None:
        remedy = "bring its config.yaml back, or choose another --run-dir"
        raise ValueError(f"{run.path} holds {left.relative_to(run.path)} of a run without its config.yaml: {remedy}")


def _start(config: RunConfig, device: str, world: World) -> TrainState:
    """The same weights on every process; with engine.shard each keeps a part of them."""
    set_seed(derive_seed(config.train.seed, "init"))
    model = GPT(config.model)
    shard = config.engine.shard and world.size > 1
    module = spread(model if shard else model.to(device), world, shard=shard)
    return TrainState(model, make_optimizer(model, config.train), module=module)


def _loop(
    state: TrainState,
    config: RunConfig,
    task: Task,
    run: RunFolder,
    device: str,
    engine: StepRunner,
    world: World,
    log: MetricsLog | None,
    report: Reporter,
    caught: list[str],
) -> TrainResult:
    """Update after update, with what comes between them. Only the main process has a log, checks and writes."""
    total, out, settings = config.train.total_steps, config.output, config.train
    fingerprint = task.fingerprint()
    evals: dict[str, float] = {}
    flops = flops_per_token(config.model, state.model.num_parameters())
    meter = ThroughputMeter(device, flops=flops, processes=world.size)
    several = (world,) if world.size > 1 else ()

    def tell(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if log is not None:
                _check_finite(line, run)
                log.write(line)
                report.step(line)

    def save(model: GPT, *, numbered: bool, best: bool) -> None:
        extra: dict[str, Any] = {"config": identity(config), "data": fingerprint, "best": state.best}
        extra |= {"processes": world.size} if several else {}
        if world.is_main and (best or not state.sharded):
            optimizer, file = (None, False) if state.sharded else (state.optimizer, numbered)
            run.save(model, optimizer, state.step, extra, numbered=file, best=best, keep=out.keep)
        if numbered and state.sharded:
            run.save_sharded(*sharded_content(state, extra), world, keep=out.keep)

    def rescued(err: OutOfMemory, options: str) -> OutOfMemory:
        """The error with how to go on; what was learned is saved, unless other processes wait in the midst of it."""
        saved = ""
        if not several:
            save(state.model, numbered=True, best=False)
            saved = f" saved {run.latest} after {state.step} updates:"
        return OutOfMemory(f"{err}{saved} go on with --resume and {options}")

    def make(step: int) -> Batch:
        return task.batch(step, "cpu", *(other.share for other in several))

    with Prefetcher(make, first=state.step, last=total, device=device, ahead=config.engine.prefetch) as feeder:
        while state.step < total:
            lr = lr_at_step(
                state.step,
                total,
                base_lr=settings.base_lr,
                warmup_steps=settings.warmup_steps,
                min_lr=settings.min_lr,
            )
            meter.begin()
            with reporting_out_of_memory(f"a batch of {settings.B} rows of T={config.model.T}: take a smaller train.B"):
                batch = feeder.next()
            meter.fed()
            try:
                made = engine.update(batch, step=state.step, lr=lr)
            except OutOfMemory as err:
                tell(meter.drain())
                more = next((n for n in range(engine.parts + 1, settings.B + 1) if settings.B % n == 0), None)
                option = f"train.accumulate={more}" if more else "engine.checkpoint_activations=true"
                raise rescued(err, f"--set {option}") from err
            supervised = None if batch.segments is None else (batch.targets != -100).sum()  # the rest is filler
            lines = meter.end(state.step, lr, made.loss, made.norm, tokens=batch.x.numel(), supervised=supervised)
            state.step += 1
            last, stopping = state.step == total, _agreed(caught, world)
            evaluating = last or state.step % out.eval_every == 0
            sampling = last or bool(out.sample_every and state.step % out.sample_every == 0)
            due = last or bool(stopping) or state.step % out.checkpoint_every == 0
            if not (evaluating or sampling or due):
                tell(lines)
                continue
            *lines, line = lines + meter.drain()
            tell(lines)
            if log is not None:
                _check_finite(line, run)
            model = whole_model(state.model) if evaluating or sampling else state.model
            improved = False
            if evaluating:
                try:
                    with engine.evaluating(), reporting_out_of_memory("the evaluation;"):
                        evals, value = task.evaluate(model, device, *several)
                except OutOfMemory as err:
                    tell([line])
                    raise rescued(err, f"--allow-config-change --set train.B={max(settings.B // 2, 1)}") from err
                if log is not None and not math.isfinite(value):
                    what = f"the validation loss became {value} after step {state.step - 1}"
                    raise _diverged(run, state.step, what)
                line["evals"] = evals
                improved = state.best is None or value < state.best["loss"]
                if improved:
                    state.best = {"step": state.step, "loss": value}
            tell([line])
            if due and log is not None:
                log.sync()
            if due or improved:
                save(model, numbered=due, best=improved)
            if sampling and world.is_main:  # after the save: what it fails of costs no update
                try:
                    with reporting_out_of_memory("the sample text;"):
                        _write_sample(model, state.step, config, task, run)
                except OutOfMemory as err:
                    raise rescued(err, "--set output.sample_every=0") from err
            del model  # of a sharded run a whole copy
            world.barrier()  # here it may take long; in the exchange of an update it may not
            if stopping and not last:
                return TrainResult(state.step, stopped_by=stopping, evals=evals, best=state.best, signal=stopping)
    return TrainResult(state.step, evals=evals, best=state.best, signal=_agreed(caught, world))


def _agreed(caught: list[str], world: World) -> str | None:
    """The signal that came, to whichever process: all stop after the same update."""
    number = world.highest(signal.Signals[caught[0]] if caught else 0)
    return signal.Signals(number).name if number else None


def _check_finite(line: dict[str, Any], run: RunFolder) -> None:
    """Raise TrainingDiverged where an update broke: nothing has been saved since."""
    loss, norm, step = line["loss"], line["grad_norm"], line["step"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        what = f"loss became {loss}" if not math.isfinite(loss) else f"gradient became {norm}"
        raise _diverged(run, step, f"the {what} at step {step} (learning rate {line['lr']:g})")


def _diverged(run: RunFolder, step: int, what: str) -> TrainingDiverged:
    """The error for a run that broke at a step; good is a checkpoint from before it, and the run goes back there."""
    good = run.go_back(step)
    where = f"the last good checkpoint is {good}" if good else "there is no checkpoint from before"
    then = "--resume --allow-config-change --set train.base_lr=LOWER"
    return TrainingDiverged(f"{what}; {where}. Try a lower train.base_lr or a longer warm-up ({then})")


def _write_sample(model: GPT, step: int, config: RunConfig, task: Task, run: RunFolder) -> None:
    prompt = task.sample_prompt()
    pieces = stream_text(
        model,
        prompt,
        max_new_tokens=config.output.sample_tokens,
        sampling=Sampling(temperature=0.8),
        generator=generator(config.train.seed, "sample", step),
        tokenizer=task.tokenizer,
    )
    text = (prompt if isinstance(prompt, str) else config.output.sample_prompt) + "".join(pieces)
    files.write_text(run.samples / f"step_{step:08d}.txt", text + "\n")


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the SIGINT, SIGTERM or SIGHUP that came; a second Ctrl-C interrupts at once.

    One that is ignored stays so: nohup asks for that.
    """
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
