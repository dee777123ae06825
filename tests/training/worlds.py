"""Worlds of several processes for tests, forked from a server that has torch loaded, so that starting one is cheap."""

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import wait

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from niels_gpt.cli.main import main
from niels_gpt.model import dropout
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import sharded_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.console import OtherProcessFailed
from niels_gpt.system.processes import open_world
from niels_gpt.training.loop import train
from niels_gpt.training.memory_limits import OutOfMemory
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.progress import Silent
from niels_gpt.training.step import StepRunner
from niels_gpt.training.tasks.byte_task import ByteTask
from niels_gpt.training.tasks.registry import open_task
from tests.ports import free_ports

TIMEOUT = 600
SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
KILLED = ("EOFError", "killed")


def run_world(size, function, *arguments):
    """The results of `function(world, *arguments)` in `size` processes; an exception is (type name, message)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *SLOW_IMPORTS])
    ports = free_ports(20)
    processes, ends = [], []
    for rank in range(size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(send, rank, size, ports, function, arguments))
        process.start()
        send.close()
        processes.append(process)
        ends.append(receive)
    results, deadline = {}, time.monotonic() + TIMEOUT
    while len(results) < size:
        ready = wait([end for rank, end in enumerate(ends) if rank not in results], deadline - time.monotonic())
        if not ready:
            for process in processes:
                process.kill()
            raise TimeoutError(f"ranks {sorted(set(range(size)) - set(results))} hang; the others gave {results}")
        for end in ready:
            try:
                results[ends.index(end)] = end.recv()
            except EOFError:
                results[ends.index(end)] = ("error", *KILLED)
    for process in processes:
        process.join()
    for kind, *value in results.values():
        if kind == "bug":
            raise AssertionError(value[0])
    return [results[rank][1] if results[rank][0] == "ok" else tuple(results[rank][1:]) for rank in range(size)]


def _work(end, rank, size, ports, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    torch.set_num_threads(1)
    try:
        if function in (commands, torchrun):
            result = function(rank, ports, *arguments)
        else:
            with open_world("cpu") as world:
                result = function(world, *arguments)
        end.send(("ok", result))
    except (ValueError, OSError, ArithmeticError, OtherProcessFailed) as err:
        end.send(("error", type(err).__name__, str(err)))
    except BaseException:
        end.send(("bug", traceback.format_exc()))


def commands(rank, ports, folder, runs):
    """(exit code, stdout, stderr) of each command line in a process of a world."""
    os.chdir(folder)
    results = []
    for port, arguments in zip(ports, runs, strict=False):
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0"}
        outputs = [folder / f".{name}.{rank}" for name in ("stdout", "stderr")]
        _redirect(*outputs)
        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        results.append((code, *(path.read_text(encoding="utf-8") for path in outputs)))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return results


def _redirect(stdout, stderr):
    """Write the output of this process and its children to two files, or to one."""
    for descriptor, path in enumerate((stdout, stderr), 1):
        with path.open("wb" if stdout != stderr else "ab") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))


def torchrun(rank, ports, folder, arguments):
    """(type of the exception, output) of torchrun --standalone --max-restarts 1 with two interrupted workers.

    This is torchrun's agent without its command line: the workers are forked, so that they need not load torch.
    """
    os.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    output = folder / ".output"
    _redirect(output, output)
    standalone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
    config = LaunchConfig(1, 1, 2, max_restarts=1, monitor_interval=0.1, start_method="fork", **standalone)
    try:
        elastic_launch(config, _interrupted_command)(arguments)
        raised = "nothing"
    except (SignalException, ChildFailedError) as err:
        raised = type(err).__name__
    return raised, output.read_text(encoding="utf-8")


def _interrupted_command(arguments):
    """Run a command whose rank 1 is killed at step 6; after the restart, torchrun gets SIGTERM at step 10."""
    batch, first = ByteTask.batch, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    register, forwarded = signal.signal, threading.Event()

    def register_watched(number, handler):
        def handle(*arguments):
            forwarded.set()
            return handler(*arguments)

        return register(number, handle if number == signal.SIGTERM and callable(handler) else handler)

    def interrupted(self, step, *share):
        if first and step == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if not first and step == 10 and os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
        if not first and step > 10:
            assert forwarded.wait(60)
        return batch(self, step, *share)

    ByteTask.batch, signal.signal = interrupted, register_watched
    main(arguments)


def digests(batch):
    """A digest of the ids, targets and positions of every span with targets, in row order."""
    found = []
    for row in range(len(batch.x)):
        ids, targets = batch.x[row].numpy(), batch.targets[row].numpy()
        segments = np.ones_like(ids) if batch.segments is None else batch.segments[row].numpy()
        for segment in np.unique(segments):
            at = (segments == segment) & (targets != -100)
            if at.any():
                positions = np.arange(len(ids)) if batch.positions is None else batch.positions[row].numpy()
                text = b"".join(column[at].astype(np.int64).tobytes() for column in (ids, targets, positions))
                found.append(hashlib.sha256(text).hexdigest())
    return found


def watched(config, *, at_step=lambda step: None):
    """(task, digests of every step): the task of a config, which records its batches."""
    task, seen = open_task(config), []
    batch = task.batch

    def watch(step, *share):
        built = batch(step, *share)
        seen.append(digests(built))
        at_step(step)
        return built

    task.batch = watch
    return task, seen


def train_all(world, runs):
    """Train (config, folder, options) one after the other; returns the digests of this process for each."""
    found = []
    for config, folder, options in runs:
        task, seen = watched(config)
        train(config, folder, task=task, world=world, **options)
        found.append(seen)
    return found


def stop(world, config, folder, step, rank=0, number=signal.SIGTERM):
    """Train, or resume, until process `rank` sends itself a signal while building a step: (steps done, signal)."""

    def send(at):
        if at == step and world.rank == rank:
            os.kill(os.getpid(), number)

    task, _ = watched(config, at_step=send)
    result = train(config, folder, task=task, world=world, resume=RunFolder(folder).exists)
    return result.step, result.stopped_by


def kill_before_latest(world, config, folder, step):
    """Train until the process kills itself after writing the checkpoint of a step, before `latest` points to it."""
    point_to = RunFolder._point_to

    def die(self, path):
        if path == self.step_path(step):
            os.kill(os.getpid(), signal.SIGKILL)
        point_to(self, path)

    RunFolder._point_to = die
    train(config, folder, world=world, resume=RunFolder(folder).exists)


def stop_and_resume(world, config, folder, step, rank, reference):
    """An uninterrupted run, and `stop` and resume: (steps, signal, saved checkpoint, steps, signal)."""
    train(config, reference, world=world)
    first = stop(world, config, folder, step, rank)
    saved = RunFolder(folder).latest.resolve().name
    result = train(config, folder, world=world, resume=True)
    return *first, saved, result.step, result.stopped_by


class Notes(Silent):
    """Records the notes for the user."""

    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def resumed(world, config, folder):
    """Resume; returns the notes that this process reports."""
    notes = Notes()
    train(config, folder, world=world, resume=True, report=notes)
    return notes.texts


def try_all(world, attempts):
    """For each (config by rank, folder by rank): "ok", "silent", or the error message of this process."""
    outcomes = []
    for configs, folders in attempts:
        try:
            train(configs[world.rank], folders[world.rank], world=world)
            outcomes.append("ok")
        except ValueError as err:
            outcomes.append(str(err))
        except OtherProcessFailed:
            outcomes.append("silent")
    return outcomes


def run_out_of_memory(world, config, folder):
    """Train until the second process runs out of memory in its fourth step."""
    step_of = StepRunner.step

    def fail(self, batch, *, step, lr):
        if world.rank == 1 and step == 3:
            raise OutOfMemory("out of memory;")
        return step_of(self, batch, step=step, lr=lr)

    StepRunner.step = fail
    train(config, folder, world=world)


def killed_while_saving(world, config, folder, times):
    """Train until the second process is killed, right after it has written its shards for the `times`-th time."""
    write, calls = sharded_checkpoint.write_shards, []

    def die(*arguments, **options):
        written = write(*arguments, **options)
        calls.append(1)
        if world.rank == 1 and len(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    sharded_checkpoint.write_shards = die
    train(config, folder, world=world)


def agreed_micro_batches(world, config):
    """The micro-batches that the ranks agree on if the first has memory for all rows, and the second for one row."""
    loss = GPT.loss

    def limited(self, x, targets, **options):
        if world.rank == 1 and len(x) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return loss(self, x, targets, **options)

    GPT.loss = limited
    try:
        model = GPT(config.model)
        runner = StepRunner(model, make_optimizer(model, config.train), config, "cpu", world=world)
        runner._agree_on_micro_batches(open_task(config).batch(0, world.share))
        return runner.micro_batches
    finally:
        GPT.loss = loss


def masks(world, config, folder):
    """Digests of the dropout masks of this process, in order."""
    drawn = []
    keep = dropout.keep_mask

    def spy(*arguments, **options):
        mask = keep(*arguments, **options)
        drawn.append(hashlib.sha256(mask.numpy().tobytes()).hexdigest())
        return mask

    dropout.keep_mask = spy
    try:
        train(config, folder, world=world)
    finally:
        dropout.keep_mask = keep
    return drawn


def in_sequence(world, calls):
    """The results of several functions, (function, *arguments) each, in one world."""
    return [function(world, *arguments) for function, *arguments in calls]
