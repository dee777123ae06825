"""`niels-gpt train`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from niels_gpt.cli.runs import new_run
from niels_gpt.config import RunConfig
from niels_gpt.config_file import config_from_dict, dump_config, load_config, to_dict
from niels_gpt.device import resolve_device
from niels_gpt.report.curves import plot_losses
from niels_gpt.terminal import count
from niels_gpt.train.loop import Result, train
from niels_gpt.train.progress import reporter
from niels_gpt.train.run_folder import RunFolder
from niels_gpt.train.schedule import lr_at_step
from niels_gpt.train.task import DataTask, open_task
from niels_gpt.train.token_task import verify_caches, with_vocabulary


def run_train(
    *,
    config: Path | None,
    run_dir: Path | None,
    resume: bool,
    overrides: list[str],
    data: Mapping[str, str | None],
    device: str,
    print_config: bool,
    verify: bool,
    allow_data_change: bool,
    allow_config_change: bool,
) -> None:
    """Train as the options say; on a signal, save, say how to go on, and exit with 128 + its number."""
    if resume and run_dir is None:
        raise ValueError("--resume needs --run-dir: which run shall go on?")
    source = config
    if resume and config is None and run_dir is not None:
        RunFolder(run_dir).read_config()  # says so if there is no run
        source = RunFolder(run_dir).config_path
    resolved = with_vocabulary(with_data(load_config(source, overrides=overrides), data))
    if print_config:
        print(dump_config(resolved), end="")
        return
    if verify:
        verify_caches(resolved)
    run = RunFolder(run_dir) if run_dir is not None else new_run(config.stem if config else "train")
    device = resolve_device(device)
    result = train_and_report(
        resolved,
        run,
        device=device,
        resume=resume,
        allow_data_change=allow_data_change,
        allow_config_change=allow_config_change,
    )
    exit_if_stopped(result.stopped_by, result, run)
    if result.best:
        print(f"best validation loss {result.best['loss']:.4f} after {result.best['step']} updates")
    print(f"run folder: {run.path} (config.yaml, metrics.jsonl, checkpoints/, samples/, loss.png)")
    place = shlex.quote(str(run.path))
    if resolved.task == "splice":
        print(f"next: niels-gpt memorize --run {place}")
    else:
        print(f"next: niels-gpt eval --run {place}   niels-gpt chat --run {place}")


def exit_if_stopped(signal: str | None, result: Result, run: RunFolder, *, command: str | None = None) -> None:
    """After a signal: say how to go on, and exit with 128 + its number."""
    if signal:
        print(f"{signal}: saved {run.latest} after {result.step} updates. Go on with")
        print(f"  {command or f'niels-gpt train --run-dir {shlex.quote(str(run.path))} --resume'}")
        sys.exit(130 if signal == "SIGINT" else 143)


def train_and_report(
    config: RunConfig,
    run: RunFolder,
    *,
    device: str,
    resume: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
) -> Result:
    """Show the sources, train with a progress display, and leave loss.png whatever happens."""
    if run.exists and not resume:  # before minutes go into building streams
        raise ValueError(f"{run.path} holds a run already: go on with --resume, or choose another --run-dir")
    lr_at_step(0, config.train.total_steps, warmup_steps=config.train.warmup_steps)  # refuses a long warm-up
    task = open_task(config)
    show_sources(task)
    try:
        return train(
            config,
            run,
            task=task,
            device=device,
            resume=resume,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
            report=reporter(),
        )
    finally:
        with contextlib.suppress(OSError):  # a full disk has said so already
            plot_losses(run)


def with_data(config: RunConfig, data: Mapping[str, str | None]) -> RunConfig:
    """The config with the data options that were given. Raises ValueError for what is not allowed."""
    tree = to_dict(config)
    tree["data"] |= {key: value for key, value in data.items() if value is not None}
    return config_from_dict(tree, where="options")


def show_sources(task: DataTask) -> None:
    """A table of what is trained on, and where it comes from."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (("source", "left"), ("share", "right"), ("train", "right"), ("held out", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("documents", justify="right")
    table.add_column("from", overflow="fold")
    for row in task.describe():
        sizes = (f"{count(size)}{row.unit}" for size in (row.train, row.held_out))
        table.add_row(row.source, f"{row.share:.1%}", *sizes, f"{row.documents:,}", escape(row.place))
    Console(highlight=False).print(table)
    for note in task.notes():
        print(note)
