"""`niels-gpt pipeline`: pretrain, then fine-tune for chat; each phase is a run with its own best checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import (
    CacheDirOption,
    DeviceOption,
    OptionalPath,
    ResumeArgument,
    TrackOption,
    VerifyOption,
    config_option,
)
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.system.processes import World


def pipeline(
    target: ResumeArgument = None,
    config: Annotated[
        OptionalPath,
        config_option("YAML file with data, pretrain and sft, or a built-in name; default: v1."),
    ] = None,
    run_dir: Annotated[OptionalPath, typer.Option("--run-dir", help="Folder of both runs; default: a new one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the pipeline RUN.")] = False,
    resume_if_there: Annotated[
        bool,
        typer.Option("--resume-if-there", help="Resume RUN if it exists, else start one there: for batch jobs."),
    ] = False,
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Override a config value, e.g. pretrain.train.base_lr=1e-3."),
    ] = [],  # noqa: B006
    cache_dir: CacheDirOption = None,
    device: DeviceOption = "auto",
    print_config: Annotated[bool, typer.Option("--print-config", help="Print both configs and exit.")] = False,
    verify: VerifyOption = False,
    track: TrackOption = [],  # noqa: B006
    allow_data_change: Annotated[
        bool,
        typer.Option("--allow-data-change", help="Resume although notes were removed; recorded beside the caches."),
    ] = False,
) -> None:
    """Pretrain on token caches, then fine-tune for chat.

    Each phase is a run with a best checkpoint. After a signal the run is saved, the command to resume is printed, and
    the exit code is 128 + the signal. Under torchrun every process runs this; a pipeline that torchrun restarts resumes
    by itself.
    """
    from niels_gpt.cli.train import check_run_dir, chosen_run_dir, print_notes

    run_dir = chosen_run_dir(target, run_dir, resume=resume, resume_if_there=resume_if_there)

    from niels_gpt.config.yaml_file import dump_config
    from niels_gpt.runs.loading import claimed_run, find_unfinished_pipeline
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.system.console import hint
    from niels_gpt.system.processes import open_world
    from niels_gpt.training.loop import check_start

    with contextlib.ExitStack() as new_folder, open_world("cpu" if print_config else device) as world:
        with world.fail_together():
            if resume and run_dir is None and world.size == 1:
                run_dir = find_unfinished_pipeline().path
                hint(f"using {run_dir}")
        folder = PipelineFolder(run_dir) if run_dir is not None else None
        holds_pipeline = world.broadcast(folder is not None and folder.exists)
        resume = resume or (holds_pipeline and (resume_if_there or world.restarts > 0))
        with world.fail_together():
            check_run_dir(run_dir, needed=resume or resume_if_there, world=world, print_config=print_config)
            notes: list[str] = []
            phases = _load_phases(config, folder if resume else None, set_, cache_dir, notes)
        if print_config:
            for name, phase in phases.items() if world.is_main else ():
                print(f"# {name}\n{dump_config(phase)}")
            return
        print_notes(notes, world)
        if folder is None:
            new = new_folder.enter_context(claimed_run(config.stem if config else "pipeline"))
            folder = PipelineFolder(new.path)
        with world.fail_together():
            for name, run in folder.runs.items():  # find a mistake in the second phase before the first one has run
                check_start(phases[name], run, device=world.device, world=world, resume=run.exists)
            finished = check_and_store(phases, folder, resume, verify, allow_data_change) if world.is_main else []
        run_phases(phases, folder, world.broadcast(finished), world, track=track)
        if world.is_main:
            _print_result(folder)


def _load_phases(
    config: Path | None,
    resumed: PipelineFolder | None,
    overrides: list[str],
    cache_dir: Path | None,
    notes: list[str],
) -> dict[str, RunConfig]:
    """Return the configs of both phases: as the options say, or, to resume, as they were stored.

    `notes` are those of `load_pipeline`. Raises ValueError.
    """
    from niels_gpt.config.yaml_file import load_pipeline, with_data
    from niels_gpt.training.tasks.token_task import with_vocabulary

    if resumed is not None and config is None:
        if overrides or cache_dir is not None:
            raise ValueError("--resume uses the stored config: --set and --cache-dir need --config")
        phases = resumed.read_configs()
    else:
        data = {"token_cache": None if cache_dir is None else str(cache_dir)}
        loaded = load_pipeline(config, overrides=overrides, notes=notes)
        phases = {name: with_data(phase, data) for name, phase in loaded.items()}
    return {name: with_vocabulary(phase) for name, phase in phases.items()}


def check_and_store(
    phases: dict[str, RunConfig],
    folder: PipelineFolder,
    resume: bool = False,
    verify: bool = False,
    allow_data_change: bool = False,
) -> list[str]:
    """Check the folder and the data of both phases, then store their configs. Return the finished phases.

    A phase that was killed after its last checkpoint, before its last sample or its plot, is not finished, unless its
    data or config has changed since. Raises ValueError, before anything is stored, also for a phase that cannot be
    resumed with its config or data.
    """
    from niels_gpt.training.progress import say
    from niels_gpt.training.resume import check_notes_read, check_resumable, with_saved_schedule
    from niels_gpt.training.tasks.registry import open_task
    from niels_gpt.training.tasks.token_task import verify_caches

    if not resume and any(run.exists for run in folder.runs.values()):
        raise ValueError(
            f"{folder.path} already holds a pipeline: resume it with --resume, or choose another --run-dir"
        )
    if resume:
        for line in check_notes_read(phases["pretrain"], folder.path, keep=allow_data_change):
            say(line)
    finished = []
    for name, run in folder.runs.items():
        phase = phases[name]
        task = open_task(phase)
        path, saved, _ = run.newest_checkpoint("cpu", tensors=False)
        if path is not None:
            trained = saved["step"] >= phase.train.total_steps and run.best.exists()
            try:
                check_resumable(path, saved["extra"], with_saved_schedule(phase, path, saved), task)
            except ValueError:
                if not trained:
                    raise
                finished.append(name)  # its data may be gone
            else:
                if trained and run.has_outputs_of(saved["step"]):
                    finished.append(name)
        if verify:
            verify_caches(phase)
    folder.write_configs(phases)
    return finished


def run_phases(
    phases: dict[str, RunConfig],
    folder: PipelineFolder,
    finished: list[str],
    world: World,
    *,
    show_samples: bool = False,
    command: str | None = None,
    track: Sequence[str] = (),
) -> None:
    """Run both phases in order, skipping a finished one. Exits after a signal, with how to resume.

    command: what to type to resume; default: `niels-gpt pipeline` with this folder. track: as for `train_and_report`.
    """
    from niels_gpt.cli.train import exit_if_stopped, program, train_and_report
    from niels_gpt.training.progress import say

    typed = command or f"{program(world)} pipeline {shlex.quote(str(folder.path))} --resume"
    for name, run in folder.runs.items():
        phase = phases[name]
        if name == "sft":
            phase = dataclasses.replace(phase, init_from=str(folder.runs["pretrain"].best))
        if name in finished:
            if world.is_main:
                say(f"{name}: {run.path} is finished")
            continue
        if world.is_main:
            trained = run.steps_saved >= phase.train.total_steps  # only its last sample or its plot is missing
            say(f"{name}: {run.path} is finished" if trained else f"{name}: into {run.path}")
        started = world.broadcast(run.exists)
        result = train_and_report(
            phase, run, device=world.device, world=world, resume=started, show_samples=show_samples, track=track
        )
        # A signal during the last step of pretraining finishes that run, but the second phase must not start.
        stopped = result.signal if name == "pretrain" else result.stopped_by
        exit_if_stopped(stopped, result, run, command=typed, world=world)


def _print_result(folder: PipelineFolder) -> None:
    """Print the losses of both phases, the best checkpoints and the next commands."""
    from niels_gpt.cli.train import show_next
    from niels_gpt.training.progress import say

    pretrain, sft = (_last_evals(run) for run in folder.runs.values())
    if "val_pretrain" in pretrain and "val_pretrain" in sft:
        say(f"val_pretrain: {pretrain['val_pretrain']:.3f} after pretraining, {sft['val_pretrain']:.3f} after SFT")
    if "val_sft" in sft:
        say(f"val_sft: {sft['val_sft']:.3f}")
    for name, run in folder.runs.items():
        say(f"best {name} checkpoint: {run.best}")
    show_next(command("chat", folder.path), command("eval", folder.path))


def _last_evals(run: RunFolder) -> dict[str, float]:
    """Return the last evaluation in metrics.jsonl."""
    evals: dict[str, float] = next((line["evals"] for line in reversed(run.metrics()) if "evals" in line), {})
    return evals
