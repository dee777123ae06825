"""`niels-gpt train`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import (
    config_from_dict,
    dump_config,
    load_config,
    to_dict,
)
from niels_gpt.report.curves import plot_losses
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import new_run
from niels_gpt.system.processes import (
    SINGLE_PROCESS,
    World,
    check_single_process,
    open_world,
)
from niels_gpt.training.loop import TrainResult, train
from niels_gpt.training.progress import reporter, say
from niels_gpt.training.tasks.token_task import verify_caches, with_vocabulary


def run_train(
    *,
    config: Path | None,
    run_dir: Path | None,
    resume: bool,
    resume_if_there: bool,
    overrides: list[str],
    data: Mapping[str, str | None],
    sources: Sequence[str],
    device: str,
    print_config: bool,
    verify: bool,
    allow_data_change: bool,
    allow_config_change: bool,
) -> None:
    """Train as the options say; on a signal, save, say how to go on, and exit with 128 + its number.

    Under torchrun all its processes come here. What it starts again after a failure goes on by itself.
    """
    with open_world("cpu" if print_config else device) as world:
        there = world.broadcast(run_dir is not None and RunFolder(run_dir).exists)
        resume = resume or (there and (resume_if_there or world.restarts > 0))
        with world.fail_together():
            if run_dir is None and (resume or resume_if_there):
                raise ValueError("--resume needs --run-dir: which run shall go on?")
            if run_dir is None and world.size > 1 and not print_config:
                raise ValueError("several processes need --run-dir: all write into one folder, and find it again")
            source = config
            if resume and config is None and run_dir is not None:
                RunFolder(run_dir).read_config()  # says so if there is no run
                source = RunFolder(run_dir).config_path
            resolved = with_vocabulary(with_data(load_config(source, overrides=overrides), data, sources))
            if verify and world.is_main and not print_config:
                verify_caches(resolved)
        if print_config:
            print(dump_config(resolved) if world.is_main else "", end="")
            return
        run = RunFolder(run_dir) if run_dir is not None else new_run(config.stem if config else "train")
        result = train_and_report(
            resolved,
            run,
            device=world.device,
            world=world,
            resume=resume,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
        )
        exit_if_stopped(result.stopped_by, result, run, world=world)
        if world.is_main:
            _say_next(resolved, run, result)


def _say_next(config: RunConfig, run: RunFolder, result: TrainResult) -> None:
    """What came out, and what to do with it."""
    if result.best:
        say(f"best validation loss {result.best['loss']:.4f} after {result.best['step']} steps")
    say(f"run folder: {run.path} (config.yaml, metrics.jsonl, checkpoints/, samples/, loss.png)")
    place = shlex.quote(str(run.path))
    if config.task == "splice":
        say(f"next: niels-gpt memorize --run {place}")
    else:
        say(f"next: niels-gpt eval --run {place}   niels-gpt chat --run {place}")


def program(world: World) -> str:
    """What a command begins with."""
    return "niels-gpt" if world.size == 1 else "torchrun (its options as before) -m niels_gpt"


def exit_if_stopped(
    name: str | None, result: TrainResult, run: RunFolder, *, command: str | None = None, world: World = SINGLE_PROCESS
) -> None:
    """After a signal: say how to go on, and exit with 128 + its number."""
    if name:
        if world.is_main:
            again = f"{program(world)} train --run-dir {shlex.quote(str(run.path))} --resume"
            say(f"{name}: saved {run.latest} after {result.step} steps. Go on with\n  {command or again}")
        sys.exit(128 + signal.Signals[name])


def train_and_report(
    config: RunConfig,
    run: RunFolder,
    *,
    device: str,
    world: World = SINGLE_PROCESS,
    resume: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
) -> TrainResult:
    """Train with a progress display, and write loss.png whatever happens."""
    with world.fail_together():
        check_single_process(world)
    result: TrainResult | None = None
    try:
        result = train(
            config,
            run,
            device=device,
            world=world,
            resume=resume,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
            report=reporter() if world.is_main else None,
        )
        return result
    finally:
        # Where another process has failed, torchrun ends this one at once: it shall say why rather than draw.
        if world.size == 1 or (world.is_main and sys.exc_info()[0] is None):
            stopping = _deaf() if result is not None and result.signal else contextlib.nullcontext()
            with stopping, contextlib.suppress(OSError, ImportError, MemoryError):  # a full disk has said so already
                plot_losses(run)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """No signal ends the block: one has come already, and how to go on is still to be said."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_data(config: RunConfig, data: Mapping[str, str | None], sources: Sequence[str] = ()) -> RunConfig:
    """The config with the data options that were given, and the places of sources (`NAME=PATH`).

    Raises ValueError for what is not allowed, and for a source that the config does not have.
    """
    tree = to_dict(config)
    tree["data"] |= {key: value for key, value in data.items() if value is not None}
    for item in sources:
        name, _, path = item.partition("=")
        if not path:
            raise ValueError(f"--source takes NAME=PATH, got {item!r}")
        if name not in config.data.sources:
            known = ", ".join(config.data.sources) or "none"
            raise ValueError(f"--source {item}: the config has no data.sources.{name}; its sources are: {known}")
        tree["data"]["sources"][name]["path"] = path
    return config_from_dict(tree, where="options")
