"""`niels-gpt train`, and what other commands share with it to train a run and show its progress."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import (
    Count,
    DeviceOption,
    OfflineOption,
    OptionalPath,
    PrimerOption,
    ResumeArgument,
    RoamOption,
    SetOption,
    SourceOption,
    TrackOption,
    VerifyOption,
    WikiOption,
    config_option,
)
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.system.processes import World
    from niels_gpt.training.loop import TrainResult


@takes_note_options
def train(
    target: ResumeArgument = None,
    config: Annotated[
        OptionalPath, config_option("YAML file or built-in name (config list); default: the v0 model.")
    ] = None,
    run_dir: Annotated[OptionalPath, typer.Option("--run-dir", help="Run folder; default: a new one in runs/.")] = None,
    steps: Annotated[
        Count, typer.Option("--steps", min=1, help="Number of all steps; with --resume a run can be extended.")
    ] = None,
    checkpoint_every: Annotated[
        Count, typer.Option("--checkpoint-every", min=1, help="Same as --set output.checkpoint_every=K.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume RUN from its newest checkpoint.")] = False,
    resume_if_there: Annotated[
        bool,
        typer.Option("--resume-if-there", help="Resume RUN if it exists, else start one there: for batch jobs."),
    ] = False,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    source: SourceOption = [],  # noqa: B006
    note_options: NoteOptions = NoteOptions(),
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-identical runs, on CUDA too; slower.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config and exit.")] = False,
    verify: VerifyOption = False,
    track: TrackOption = [],  # noqa: B006
    allow_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Resume even if the data has changed.")
    ] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="Resume with other training settings.")
    ] = False,
) -> None:
    """Train a model, or resume a run.

    After a signal the run is saved, the command to resume is printed, and the exit code is 128 + the signal. Under
    torchrun every process runs this; a run that torchrun restarts resumes by itself.
    """
    run_dir = chosen_run_dir(target, run_dir, resume=resume, resume_if_there=resume_if_there)

    from niels_gpt.config.yaml_file import dump_config, load_config, with_data
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.loading import claimed_run, find_run, find_unfinished_run
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.system.console import hint
    from niels_gpt.system.processes import open_world
    from niels_gpt.training.tasks.registry import with_derived_values

    overrides = list(set_)
    overrides += [f"train.total_steps={steps}", "splice.epochs=null"] if steps is not None else []
    overrides += [f"output.checkpoint_every={checkpoint_every}"] if checkpoint_every is not None else []
    overrides += ["engine.deterministic=true"] if deterministic else []
    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    with contextlib.ExitStack() as new_folder, open_world("cpu" if print_config else device) as world:
        with world.fail_together():
            if resume and run_dir is None and world.size == 1:
                run_dir = (find_unfinished_run() if steps is None else find_run(None)).path
                hint(f"using {run_dir}")
            if run_dir is not None and resume and PipelineFolder(run_dir).exists:
                raise ValueError(f"{run_dir} is a pipeline: {command('pipeline', run_dir, '--resume')}")
        run = RunFolder(run_dir) if run_dir is not None else None
        holds_run = world.broadcast(run is not None and run.exists)
        resume = resume or (holds_run and (resume_if_there or world.restarts > 0))
        with world.fail_together():
            check_run_dir(run_dir, needed=resume or resume_if_there, world=world, print_config=print_config)
            config_path = config
            if resume and config is None and run is not None:
                if not run.exists:
                    raise ValueError(f"nothing to resume: {run.path} is not a run (it has no config.yaml)")
                config_path = run.config_path
            notes: list[str] = []
            resolved = with_data(load_config(config_path, overrides=overrides, notes=notes), data, source)
            if print_config:
                resolved = with_derived_values(resolved, resume=resume)
        if print_config:
            print(dump_config(resolved) if world.is_main else "", end="")
            return
        if roam not in (None, "embedded") and not resume:
            notes += _about_shares(resolved, str(roam))
        print_notes(notes, world)
        run = run or new_folder.enter_context(claimed_run(config.stem if config else "train"))
        result = train_and_report(
            resolved,
            run,
            device=world.device,
            world=world,
            resume=resume,
            verify=verify,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
            track=track,
        )
        exit_if_stopped(result.stopped_by, result, run, world=world)
        if world.is_main:
            _print_result(resolved, run, result)


def _about_shares(config: RunConfig, folder: str) -> list[str]:
    """Return a line for a person with notes, if the config has the default shares, which are not made for them."""
    from niels_gpt.config.schema import default_p_train, default_p_val

    train = config.train
    if config.task != "bytes" or train.p_train != default_p_train() or train.p_val != default_p_val():
        return []
    return [
        f"{train.p_train['roam']:.0%} of the rows are your notes, and wiki selects the best checkpoint "
        f"(train.p_train, train.p_val); for a model of your notes: {command('notes', folder)}"
    ]


def chosen_run_dir(target: OptionalPath, run_dir: OptionalPath, *, resume: bool, resume_if_there: bool) -> OptionalPath:
    """Return the folder that RUN or --run-dir names. Raises ValueError for both, and for RUN without --resume."""
    if target is None:
        return run_dir
    if run_dir is not None:
        raise ValueError(f"{target} and --run-dir {run_dir} name the same thing: give one of them")
    if not resume and not resume_if_there:
        raise ValueError(f"to resume {target}, add --resume; to start a new run there, use --run-dir {target}")
    return target


def check_run_dir(run_dir: OptionalPath, *, needed: bool, world: World, print_config: bool) -> None:
    """Raise ValueError if --run-dir is missing where the other options or several processes need it."""
    if run_dir is None and needed:
        raise ValueError("--resume-if-there, and --resume in several processes, need --run-dir: name the folder")
    if run_dir is None and world.size > 1 and not print_config:
        raise ValueError(f"{world.size} processes need --run-dir: all of them write into the same folder")


def print_notes(notes: list[str], world: World) -> None:
    """Print what was adapted in a config, once: on the main process."""
    from niels_gpt.training.progress import say

    for note in notes if world.is_main else ():
        say(note)


def _print_result(config: RunConfig, run: RunFolder, result: TrainResult) -> None:
    """Print the best loss, the run folder and the next commands."""
    from niels_gpt.training.progress import say

    if result.best:
        say(f"best validation loss {result.best['loss']:.4f} after {result.best['step']} steps")
    say(f"run folder: {run.path} (config.yaml, metrics.jsonl, checkpoints/, samples/, loss.png)")
    after = {
        "splice": [command("research", "memorize", run.path)],
        "pretrain": [command("eval", run.path), command("generate", run.path, "The ")],  # it has not learned to chat
    }
    show_next(*after.get(config.task, [command("eval", run.path), command("chat", run.path)]))


def show_next(*commands: str) -> None:
    """Print what to type next, several commands on a line each, unless --quiet was given."""
    from niels_gpt.system.console import is_quiet
    from niels_gpt.training.progress import say

    if not is_quiet():
        say(f"next: {commands[0]}" if len(commands) == 1 else "\n  ".join(["next:", *commands]))


def program(world: World) -> str:
    """Return the beginning of a command that runs in as many processes as this one."""
    return command() if world.size == 1 else "torchrun (same options) -m niels_gpt"


def exit_if_stopped(
    name: str | None, result: TrainResult, run: RunFolder, *, command: str | None = None, world: World | None = None
) -> None:
    """Exit with 128 + the number of the signal `name`, after printing how to resume; do nothing for None.

    `command` is what to type to resume; default: `niels-gpt train` with this run.
    """
    from niels_gpt.system.processes import SINGLE_PROCESS
    from niels_gpt.training.progress import say

    world = world or SINGLE_PROCESS
    if name:
        if world.is_main:
            command = command or f"{program(world)} train {shlex.quote(str(run.path))} --resume"
            say(f"{name}: saved {run.latest} after {result.step} steps. Resume with\n  {command}")
        sys.exit(128 + signal.Signals[name])


def train_and_report(
    config: RunConfig,
    run: RunFolder,
    *,
    device: str,
    world: World | None = None,
    resume: bool = False,
    verify: bool = False,
    allow_data_change: bool = False,
    allow_config_change: bool = False,
    show_samples: bool = False,
    track: Sequence[str] = (),
) -> TrainResult:
    """Train with a progress display, and write loss.png however the training ends, unless it did not start.

    track: the names of trackers (`training.tracking`) that get the metrics, too.
    """
    from niels_gpt.report.curves import plot_losses
    from niels_gpt.system.console import optional_write
    from niels_gpt.system.processes import SINGLE_PROCESS, check_single_process
    from niels_gpt.training import loop, progress, tracking

    world = world or SINGLE_PROCESS
    check_single_process(world)
    result: TrainResult | None = None
    report: progress.Reporter | None = progress.reporter(show_samples=show_samples) if world.is_main else None
    if report is not None and track:
        report = tracking.Several(report, tracking.Tracking(run, config, track, report))
    metrics_before = _modified(run.metrics_path)
    try:
        result = loop.train(
            config,
            run,
            device=device,
            world=world,
            resume=resume,
            verify=verify,
            allow_data_change=allow_data_change,
            allow_config_change=allow_config_change,
            report=report,
        )
        return result
    finally:
        # If another process has failed, torchrun ends this one soon: report the error rather than draw.
        drawing = world.size == 1 or (world.is_main and sys.exc_info()[0] is None)
        if drawing and _modified(run.metrics_path) != metrics_before:
            after_signal = _ignore_signals() if result is not None and result.signal else contextlib.nullcontext()
            failures = (OSError, ImportError, MemoryError)
            # The run itself is saved. After an error of the training, that error is the one line to print.
            drawn = optional_write(run.plot_path, *failures) if result is not None else contextlib.suppress(*failures)
            with after_signal, drawn:
                plot_losses(run)


def _modified(path: Path) -> int | None:
    """Return when a file was last modified, in nanoseconds; None if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore further signals in the block: the first one still has to be answered with how to resume."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
