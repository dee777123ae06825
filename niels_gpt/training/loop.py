"""The training loop. A task supplies the batches; everything else is here.

Step s trains on batch s with the learning rate of step s. A checkpoint "of step s" holds the weights after s steps, so
training resumes with batch s. No other state is saved: batches and dropout masks are functions of (seed, step), and a
resumed run is bit for bit equal to an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from niels_gpt.config import RunConfig
from niels_gpt.config.public_model import is_public
from niels_gpt.config.unused import check_used
from niels_gpt.data.note_record import record_notes
from niels_gpt.data.note_selection import SelectedNotes
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.inference.generation import stream_text
from niels_gpt.inference.sampling import Sampling
from niels_gpt.kernels.replaced import plain_inside, plain_wanted
from niels_gpt.model.gpt import GPT
from niels_gpt.model.lora import add_adapters
from niels_gpt.pretrained.initial_weights import initial_path
from niels_gpt.pretrained.public_base import record_base
from niels_gpt.runs.checkpoint import save_base
from niels_gpt.runs.environment import DIVERGED, FINISHED, STOPPED, Session, recorded_session
from niels_gpt.runs.folder import MetricsLog, RunFolder
from niels_gpt.runs.loading import claimed_run
from niels_gpt.system import files, host_limits
from niels_gpt.system.device import check_precision, resolve_device
from niels_gpt.system.machine import machine_facts
from niels_gpt.system.processes import SINGLE_PROCESS, World
from niels_gpt.system.program import command
from niels_gpt.system.rng import derive_seed, generator, set_seed
from niels_gpt.training.memory_limits import OutOfMemory, check_size, reporting_out_of_memory, weights_text
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.optim.schedule import scheduled_lr
from niels_gpt.training.parallel.agreement import check_rows, check_same
from niels_gpt.training.parallel.sharding import distribute, full_model
from niels_gpt.training.prefetch import Prefetcher
from niels_gpt.training.progress import Reporter, Silent
from niels_gpt.training.resume import TrainState, check_notes_read, identity, initialize, restore, sharded_content
from niels_gpt.training.step import StepRunner, deterministic, first_line
from niels_gpt.training.tasks.base import Batch, Task
from niels_gpt.training.tasks.registry import open_task, sources_with_licences, with_derived_values
from niels_gpt.training.tasks.token_task import verify_caches
from niels_gpt.training.throughput import ThroughputMeter, flops_per_token


class TrainingDiverged(FloatingPointError):
    """The loss or the gradient became NaN or infinite."""


class DeviceFailed(ValueError):
    """A GPU failed during a run: a fault of the device, its driver, or a kernel."""

    leave_at_once = True
    """A command exits without cleaning up: freeing memory of a failed device aborts the process with a stack dump."""


@dataclass
class TrainResult:
    """How a run ended."""

    step: int
    """Steps done."""
    run_dir: Path
    """The run folder: config, metrics, checkpoints and samples."""
    stopped_by: str | None = None
    """The signal that stopped the run early."""
    signal: str | None = None
    """The signal that was received, even if it came with the last step: nothing should follow this run."""
    evals: dict[str, float] = field(default_factory=dict)
    """The last evaluation: loss in nats per token by held-out set."""
    best: dict[str, Any] | None = None
    """Step and validation loss of the best checkpoint."""


def train(
    config: RunConfig,
    run_dir: str | Path | RunFolder | None = None,
    *,
    device: str = "auto",
    resume: bool = False,
    task: Task | None = None,
    world: World = SINGLE_PROCESS,
    verify: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
    report: Reporter | None = None,
) -> TrainResult:
    """Train until train.total_steps or a signal: a new run, or with `resume` from the newest checkpoint.

    A resumed run may have another train.total_steps than before; the learning rate follows (`scheduled_lr`).

    run_dir: the run folder; None creates runs/train, runs/train-2, ...
    task: an opened task; by default the one that the config describes, with model.V set to its vocabulary.
    world: under torchrun, the world of this process. All processes call `train`; only the main one writes and reports.
    verify: compare the checksums of all files of the token caches before training.
    report: receives progress (`niels_gpt.training.progress.reporter()` prints it); by default nothing is printed.

    Raises ValueError before any work for a config that does not fit, a folder that already holds a run (or none, with
    `resume`), and data or a config that differs from the checkpoint's; TrainingDiverged for a NaN or infinite loss;
    DeviceFailed if a GPU fails; OSError if the disk is full. Saved checkpoints stay usable in every case. A new run
    that ends in ValueError before its first step leaves the folder free.
    """
    if run_dir is None:
        with claimed_run("train") as run:
            return train(
                config,
                run,
                device=device,
                resume=resume,
                task=task,
                world=world,
                verify=verify,
                allow_data_change=allow_data_change,
                allow_config_change=allow_config_change,
                report=report,
            )
    run = run_dir if isinstance(run_dir, RunFolder) else RunFolder(run_dir)
    report = report if report is not None and world.is_main else Silent()
    selections: dict[str, SelectedNotes] = {}
    notes: list[str] = []
    sources: list[dict[str, Any]] = []
    config = with_absolute_paths(config)
    with world.fail_together():
        if resume and run.imported:
            start = command("train", "--set", f"init_from={run.path}")
            raise ValueError(
                f"{run.path} is an imported model without training steps: start a new run from it with {start}"
            )
        device = world.device if world.size > 1 and device == "auto" else resolve_device(device)
        if task is None:
            subset = resume and run.exists and config.splice.restrict_to_training_subset
            stored = run.read_config() if subset else None
            config = with_derived_values(config, resume=resume, stored=stored, notes=notes)
        check_start(config, run, device=device, world=world, resume=resume)
        if config.train.lora.rank and not config.init_from:
            raise ValueError(
                f"train.lora.rank={config.train.lora.rank} freezes the initial weights, but init_from is empty, so "
                "they are random: set init_from to a checkpoint, or train.lora.rank=0"
            )
        if resume and run.exists and world.is_main:
            notes += check_notes_read(config, run.path, keep=allow_data_change)
        if verify and world.is_main:
            verify_caches(config)
    for note in notes:
        report.note(note)
    if task is None:
        opened = world.main_first(lambda: open_task(config))
        task, selections, sources = opened, opened.selections(), sources_with_licences(opened, config)
        report.data(opened)
    check_same(config, task.fingerprint(), {"--run-dir": str(run.path), "--resume": resume}, world)
    with contextlib.ExitStack() as stack:
        with world.fail_together():
            if world.is_main:
                stack.enter_context(run.lock())
                _check_folder(run, resume)  # again under the lock: another process may have started a run meanwhile
        stack.enter_context(deterministic(config.engine.deterministic, device))
        stack.enter_context(plain_inside(config.engine.backend == "plain"))
        caught = stack.enter_context(_catch_signals())
        with reporting_out_of_memory(f"a model of {weights_text(config.model)} on {device}: use a smaller one"):
            state = _initial_state(config, device, world)
            if resume:
                config = restore(
                    state, config, task, run, device, allow_data_change, allow_config_change, report, world
                )
            with world.fail_together():
                scheduled_lr(0, config.train)  # rejects a long warm-up of a resumed run that has no checkpoint yet
                origin = initialize(state, config, task, device) if config.init_from and state.step == 0 else None
        with world.fail_together():
            runner = StepRunner(
                state.model, state.optimizer, config, device, world=world, module=state.module, note=report.note
            )
            log = None
            if world.is_main:
                if config.train.lora.rank and origin is not None:
                    state.base = save_base(run.checkpoints, state.model, step=origin.step, data=origin.data)
                if resume:
                    run.keep_metrics_before(state.step)
                    run.retain(config.output.keep, up_to=state.step)  # killed before it deleted old checkpoints
                if origin is not None and is_public(config.init_from):
                    record_base(run, config.init_from)
                run.write_config(config)
                run.write_tokenizer(task.tokenizer)
                run.write_skipped(selections)
                if not resume:
                    record_notes(run.path, selections, config.data.notes)
                log = stack.enter_context(contextlib.closing(MetricsLog(run.metrics_path)))
        if resume and state.step >= config.train.total_steps:
            report.note(f"all {state.step} steps are done: for a larger number of steps, {run.extend_command}")
        report.note(f"backend: {runner.backend}")
        report.start(first=state.step, total=config.train.total_steps)
        stack.callback(report.close)
        try:
            with (
                _recorded_session(run, state, task, sources, device, runner.backend, world) as session,
                _reporting_device_failure(device, state, run),
            ):
                result = _loop(state, config, task, run, device, runner, world, log, report, caught)
                session.outcome = STOPPED if result.stopped_by else FINISHED
                session.reason = result.signal or ""
                return result
        except ValueError:
            if world.is_main and state.step == 0 and not resume:
                run.release()
            raise


@contextlib.contextmanager
def _recorded_session(
    run: RunFolder,
    state: TrainState,
    task: Task,
    sources: Sequence[Mapping[str, Any]],
    device: str,
    backend: str,
    world: World,
) -> Iterator[Session]:
    """Record on the main process that the run starts, and how it ends; see `runs.environment`."""
    recorded = recorded_session(
        run.path,
        step=state.step,
        processes=world.size,
        machine={**machine_facts(device), "backend": backend},
        data=sources,
        fingerprint=task.fingerprint(),
        write=world.is_main,
    )
    with recorded as session:
        try:
            yield session
        except TrainingDiverged:
            session.outcome = DIVERGED
            raise
        finally:
            session.steps = state.step


@contextlib.contextmanager
def _reporting_device_failure(device: str, state: TrainState, run: RunFolder) -> Iterator[None]:
    """Raise DeviceFailed, with how to resume, if the device fails in the block."""
    try:
        yield
    except torch.AcceleratorError as err:
        newest = next(iter(run.step_files()), None)
        remedy = f"resume from {newest} with {run.resume_command}" if newest else "no checkpoint had been saved"
        raise DeviceFailed(f"{device} failed after {state.step} steps ({first_line(err)}): {remedy}") from err


def check_start(
    config: RunConfig, run: RunFolder, *, device: str, world: World = SINGLE_PROCESS, resume: bool = False
) -> None:
    """Raise ValueError for a run that cannot start, as far as this is known without reading its data."""
    if not resume:  # else total_steps may have changed, and the warm-up belongs to the steps before
        scheduled_lr(0, config.train)  # rejects a long warm-up
    plain_wanted()  # rejects a wrong value of its variable
    check_rows(config, world)
    check_precision(config.train.precision, device)
    check_size(config, processes=world.size)
    if not resume:  # a stored config is only read
        default = with_absolute_paths(RunConfig(task=config.task))
        check_used(with_absolute_paths(config), default, device=device, processes=world.size)
    if config.init_from and not resume:
        initial_path(config.init_from)
    if world.is_main:
        _check_folder(run, resume)


def _check_folder(run: RunFolder, resume: bool) -> None:
    files.check_output_path(run.path, "--run-dir", folder=True)
    if resume and not run.exists:
        raise ValueError(f"nothing to resume: {run.path} is not a run (it has no config.yaml)")
    if run.exists and not resume:
        remedy = f"resume it with {run.resume_command}, or choose another --run-dir"
        raise ValueError(f"{run.path} already holds a run: {remedy}")
    if (orphan := run.orphan()) is not None:
        remedy = "restore its config.yaml, or choose another folder"
        raise ValueError(f"{run.path} holds {orphan.relative_to(run.path)} of a run, but no config.yaml: {remedy}")


def _initial_state(config: RunConfig, device: str, world: World) -> TrainState:
    """The initial weights, equal on every process; with engine.shard each process keeps only its shard."""
    host_limits.prepare_torch()
    set_seed(derive_seed(config.train.seed, "init"))
    model = GPT(config.model)
    if config.train.lora.rank:
        add_adapters(model, config.train.lora)
    shard = config.engine.shard and world.size > 1
    module = distribute(model if shard else model.to(device), world, shard=shard)
    return TrainState(model, make_optimizer(model, config.train), module=module)


def _loop(
    state: TrainState,
    config: RunConfig,
    task: Task,
    run: RunFolder,
    device: str,
    runner: StepRunner,
    world: World,
    log: MetricsLog | None,
    report: Reporter,
    caught: list[str],
) -> TrainResult:
    """Run the steps, with evaluations, checkpoints and samples between them. Only the main process has a log."""
    total, out, settings = config.train.total_steps, config.output, config.train
    fingerprint = task.fingerprint()
    evals: dict[str, float] = {}
    frozen = sum(weight.numel() for weight in state.model.parameters() if not weight.requires_grad)
    flops = flops_per_token(config.model, state.model.num_parameters(), frozen=frozen)
    meter = ThroughputMeter(device, flops=flops, processes=world.size)

    def record(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if log is not None:
                _check_finite(line, run)
                log.write(line)
                report.step(line)

    def save(model: GPT, *, numbered: bool, best: bool) -> None:
        extra: dict[str, Any] = {"config": identity(config), "data": fingerprint, "best": state.best}
        extra |= {"processes": world.size} if world.size > 1 else {}
        extra |= {"data_changed": state.data_changed} if state.data_changed else {}
        extra |= {"lora": {"scale": settings.lora.scale, "base": state.base}} if settings.lora.rank else {}
        if world.is_main and (best or not state.sharded):
            optimizer, file = (None, False) if state.sharded else (state.optimizer, numbered)
            run.save(model, optimizer, state.step, extra, numbered=file, best=best, keep=out.keep)
        if numbered and state.sharded:
            run.save_sharded(*sharded_content(state, extra), world, keep=out.keep)

    def save_and_explain(err: OutOfMemory, options: str) -> OutOfMemory:
        """The error with how to resume. A single process saves its state; several would wait for each other."""
        saved = ""
        if world.size == 1:
            save(state.model, numbered=True, best=False)
            saved = f" saved {run.latest} after {state.step} steps:"
        return OutOfMemory(f"{err}{saved} resume with {run.resume_command} {options}")

    def sample_due(step: int) -> bool:
        return step == total or bool(out.sample_every and step % out.sample_every == 0)

    def sample(model: GPT) -> None:
        try:
            with reporting_out_of_memory("the sample text;"), report.working("writing a sample"):
                text = _write_sample(model, state.step, config, task, run)
            report.sample(state.step, config.output.sample_prompt, text)
        except OutOfMemory as err:
            raise save_and_explain(err, "--set output.sample_every=0") from err

    def build(step: int) -> Batch:
        return task.batch(step, world.share)

    if world.broadcast(state.step > 0 and sample_due(state.step) and not run.sample_path(state.step).exists()):
        model = full_model(state.model)  # killed between the checkpoint and its sample
        if world.is_main:
            sample(model)
        del model

    with Prefetcher(build, first=state.step, last=total, device=device, ahead=config.engine.prefetch) as batches:
        while state.step < total:
            lr = scheduled_lr(state.step, settings)
            meter.begin()
            with reporting_out_of_memory(f"a batch of {settings.B} rows of T={config.model.T}: use a smaller train.B"):
                batch = batches.next()
            meter.batch_ready()
            try:
                result = runner.step(batch, step=state.step, lr=lr)
            except OutOfMemory as err:
                record(meter.drain())
                more = next((n for n in range(runner.micro_batches + 1, settings.B + 1) if settings.B % n == 0), None)
                option = f"train.accumulate={more}" if more else "engine.checkpoint_activations=true"
                raise save_and_explain(err, f"--set {option}") from err
            supervised = None if batch.segments is None else (batch.targets != -100).sum()  # the rest is filler
            tokens = batch.lengths().sum() if config.task == "sft" else batch.x.numel()
            lines = meter.end(state.step, lr, result.loss, result.norm, tokens=tokens, supervised=supervised)
            state.step += 1
            last, stopping = state.step == total, _signal_on_any_rank(caught, world)
            evaluating = last or state.step % out.eval_every == 0
            sampling = sample_due(state.step)
            due = last or bool(stopping) or state.step % out.checkpoint_every == 0
            if not (evaluating or sampling or due):
                record(lines)
                continue
            *lines, line = lines + meter.drain()
            record(lines)
            if log is not None:
                _check_finite(line, run)
            model = full_model(state.model) if evaluating or sampling else state.model
            improved = False
            if evaluating:
                try:
                    with (
                        report.working("evaluating"),
                        runner.evaluating(),
                        reporting_out_of_memory("the evaluation;"),
                    ):
                        evals, value = task.evaluate(model, device, world)
                except OutOfMemory as err:
                    record([line])
                    smaller = f"--allow-config-change --set train.B={max(settings.B // 2, 1)}"
                    raise save_and_explain(err, smaller) from err
                if log is not None and not math.isfinite(value):
                    what = f"the validation loss became {value} after step {state.step - 1}"
                    raise _diverged(run, state.step, what)
                line["evals"] = evals
                improved = state.best is None or value < state.best["loss"]
                if improved:
                    state.best = {"step": state.step, "loss": value}
            record([line])
            if due and log is not None:
                log.sync()
            if due or improved:
                save(model if state.sharded else state.model, numbered=due, best=improved)
            if sampling and world.is_main:  # after the save, so a failure here loses nothing
                sample(model)
            del model  # with engine.shard this is a full copy of the weights
            world.barrier()  # the main process may have taken longer than the timeout of a gradient exchange
            if stopping and not last:
                return TrainResult(
                    state.step, run.path, stopped_by=stopping, evals=evals, best=state.best, signal=stopping
                )
    signal_name = _signal_on_any_rank(caught, world)
    return TrainResult(state.step, run.path, evals=evals, best=state.best, signal=signal_name)


def _signal_on_any_rank(caught: list[str], world: World) -> str | None:
    """The signal that any process received, so that all stop after the same step."""
    number = world.max(signal.Signals[caught[0]] if caught else 0)
    return signal.Signals(number).name if number else None


def _check_finite(line: dict[str, Any], run: RunFolder) -> None:
    """Raise TrainingDiverged if the loss or the gradient norm of a metrics line is NaN or infinite."""
    loss, norm, step = line["loss"], line["grad_norm"], line["step"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        what = f"loss became {loss}" if not math.isfinite(loss) else f"gradient norm became {norm}"
        raise _diverged(run, step, f"the {what} at step {step} (learning rate {line['lr']:g})")


def _diverged(run: RunFolder, step: int, what: str) -> TrainingDiverged:
    """The error for a run that diverged at a step. Checkpoints from that step on are set aside as diverged_*."""
    good = run.discard_from(step)
    where = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
    remedy = f"{run.resume_command} --allow-config-change --set train.base_lr=LOWER"
    return TrainingDiverged(f"{what}; {where}. Try a lower train.base_lr or a longer warm-up ({remedy})")


def _write_sample(model: GPT, step: int, config: RunConfig, task: Task, run: RunFolder) -> str:
    """Continue the sample prompt, write both to a file, and return the continuation."""
    prompt = task.sample_prompt()
    chunks = stream_text(
        model,
        prompt,
        max_new_tokens=config.output.sample_tokens,
        sampling=Sampling(temperature=0.8),
        generator=generator(config.train.seed, "sample", step),
        tokenizer=task.tokenizer,
    )
    text = "".join(chunks)
    shown = prompt if isinstance(prompt, str) else config.output.sample_prompt
    files.write_text(run.sample_path(step), f"{shown}{text}\n")
    return text


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[str]]:
    """The names of the SIGINT, SIGTERM or SIGHUP received in the block; a second Ctrl-C raises KeyboardInterrupt.

    A signal that is ignored (nohup ignores SIGHUP) stays ignored.
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
