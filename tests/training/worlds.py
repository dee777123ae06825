"""Several processes for the tests: forked from a server that has torch loaded, so that a world costs no start-up."""

import hashlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait

import numpy as np
import torch

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
from niels_gpt.training.tasks.registry import open_task

SECONDS = 120


def run_world(size, function, *arguments):
    """What `function(world, *arguments)` gives in each of `size` processes; an exception is given as (type, text)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, ends = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, rank, size, port, function, arguments))
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    found, deadline = {}, time.monotonic() + SECONDS
    while len(found) < size:
        ready = wait([end for rank, end in enumerate(ends) if rank not in found], deadline - time.monotonic())
        if not ready:
            for process in processes:
                process.kill()
            raise TimeoutError(f"ranks {sorted(set(range(size)) - set(found))} hang; the others gave {found}")
        for end in ready:
            try:
                found[ends.index(end)] = end.recv()
            except EOFError:
                found[ends.index(end)] = ("error", "EOFError", "it was killed")
    for process in processes:
        process.join()
    for kind, *what in found.values():
        if kind == "bug":
            raise AssertionError(what[0])
    return [found[rank][1] if found[rank][0] == "ok" else tuple(found[rank][1:]) for rank in range(size)]


def _work(end, rank, size, port, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        if function is command:
            result = command(rank, *arguments)
        else:
            with open_world("cpu") as world:
                result = function(world, *arguments)
        end.send(("ok", result))
    except (ValueError, OSError, ArithmeticError, OtherProcessFailed) as err:
        end.send(("error", type(err).__name__, str(err)))
    except BaseException:
        end.send(("bug", traceback.format_exc()))


def command(rank, place, arguments, variables):
    """(exit code, stdout, stderr) of a command line in a process of a world."""
    os.chdir(place)
    os.environ |= variables
    outputs = [place / f".{name}.{rank}" for name in ("stdout", "stderr")]
    for number, path in enumerate(outputs, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code, *(path.read_text(encoding="utf-8") for path in outputs)


def digests(batch):
    """Of every span that is learned from, wherever it lies: of its ids and its positions."""
    found = []
    for row in range(len(batch.x)):
        ids, targets = batch.x[row].numpy(), batch.targets[row].numpy()
        segments = np.ones_like(ids) if batch.segments is None else batch.segments[row].numpy()
        for segment in np.unique(segments):
            at = (segments == segment) & (targets != -100)
            if at.any():
                places = np.arange(len(ids)) if batch.positions is None else batch.positions[row].numpy()
                text = b"".join(part[at].astype(np.int64).tobytes() for part in (ids, targets, places))
                found.append(hashlib.sha256(text).hexdigest())
    return found


def watched(config, *, at_step=lambda step: None):
    """(task, digests of every step): the task of a config, which keeps what was learned from."""
    task, seen = open_task(config), []
    batch = task.batch

    def watch(step, *rest):
        made = batch(step, *rest)
        seen.append(digests(made))
        at_step(step)
        return made

    task.batch = watch
    return task, seen


def train_all(world, runs):
    """Train (config, folder, options) one after the other: for each what this process learned from."""
    found = []
    for config, folder, options in runs:
        task, seen = watched(config)
        train(config, RunFolder(folder), task=task, world=world, **options)
        found.append(seen)
    return found


def stop(world, config, folder, step, rank=0, number=signal.SIGTERM):
    """Train until process `rank` gets a signal in the making of a step: (updates done, the signal)."""

    def signalled(at):
        if at == step and world.rank == rank:
            os.kill(os.getpid(), number)

    task, _ = watched(config, at_step=signalled)
    result = train(config, RunFolder(folder), task=task, world=world)
    return result.step, result.stopped_by


def stop_and_resume(world, config, folder, step, rank, whole):
    """`stop`, then go on: where it stopped and why, what was saved, where it ended and why. And a run that did not."""
    train(config, RunFolder(whole), world=world)
    first = stop(world, config, folder, step, rank)
    saved = RunFolder(folder).latest.resolve().name
    result = train(config, RunFolder(folder), world=world, resume=True)
    return *first, saved, result.step, result.stopped_by


class Notes(Silent):
    """Keeps what a person would read."""

    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def resumed(world, config, folder):
    """Go on; what this process says."""
    notes = Notes()
    train(config, RunFolder(folder), world=world, resume=True, report=notes)
    return notes.texts


def refused(world, pairs, place):
    """For each pair of configs, one per process: the error that this process raises, `silent`, or `ok`.

    The last of several pairs is to train into two folders.
    """
    said = []
    for number, configs in enumerate(pairs):
        folder = place / ("ok" if len(pairs) == 1 else f"run-{number}")
        folder /= str(world.rank) if 0 < number == len(pairs) - 1 else ""
        try:
            train(configs[world.rank], RunFolder(folder), world=world)
            said.append("ok")
        except ValueError as err:
            said.append(str(err))
        except OtherProcessFailed:
            said.append("silent")
    return said


def failing(world, config, folder, kind):
    """Train until the second process fails in its fourth update."""
    update = StepRunner.step

    def fail(self, batch, *, step, lr):
        if world.rank == 1 and step == 3:
            raise OutOfMemory("no room;") if kind == "memory" else KeyError("a bug")
        return update(self, batch, step=step, lr=lr)

    StepRunner.step = fail
    try:
        train(config, RunFolder(folder), world=world)
    except (OutOfMemory, KeyError) as err:
        raise ValueError(str(err)) from err


def killed_while_saving(world, config, folder, times):
    """Train; the second process is killed in the writing of a checkpoint, when it has written its part."""
    write, calls = sharded_checkpoint.write_shards, []

    def die(*arguments, **options):
        written = write(*arguments, **options)
        calls.append(1)
        if world.rank == 1 and len(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    sharded_checkpoint.write_shards = die
    train(config, RunFolder(folder), world=world)


def parts_that_fit(world, config):
    """The parts that the processes agree on, where the second has room for one row, and the first for all."""
    loss = GPT.loss

    def limited(self, x, targets, **options):
        if world.rank == 1 and len(x) > 1:
            raise torch.OutOfMemoryError("no room")
        return loss(self, x, targets, **options)

    GPT.loss = limited
    model = GPT(config.model)
    engine = StepRunner(model, make_optimizer(model, config.train), config, "cpu", world=world)
    engine._agree_on_micro_batches(open_task(config).batch(0, world.share))
    return engine.micro_batches


def masks(world, config, folder):
    """The dropout masks of this process, in order."""
    drawn = []
    keep = dropout.keep_mask

    def spy(*arguments, **options):
        mask = keep(*arguments, **options)
        drawn.append(hashlib.sha256(mask.numpy().tobytes()).hexdigest())
        return mask

    dropout.keep_mask = spy
    try:
        train(config, RunFolder(folder), world=world)
    finally:
        dropout.keep_mask = keep
    return drawn
