"""`niels-gpt pipeline`: pretrain, then fine-tune for chat, each with its own best checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

from niels_gpt.cli.train import exit_if_stopped, program, train_and_report
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import dump_config, load_config, load_pipeline
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import new_run
from niels_gpt.system import files
from niels_gpt.system.processes import World, open_world
from niels_gpt.training.loop import check_start
from niels_gpt.training.progress import say
from niels_gpt.training.tasks.registry import open_task
from niels_gpt.training.tasks.token_task import verify_caches, with_vocabulary

PHASES = ("pretrain", "sft")


def run_pipeline(
    *,
    config: Path | None,
    run_dir: Path | None,
    resume: bool,
    resume_if_there: bool,
    overrides: list[str],
    token_cache: Path | None,
    device: str,
    print_config: bool,
    verify: bool,
) -> None:
    """Run both phases, or go on with them; on a signal, save, say how to go on, and exit with 128 + its number.

    Under torchrun all its processes come here. What it starts again after a failure goes on by itself.
    """
    with open_world("cpu" if print_config else device) as world:
        there = world.broadcast(run_dir is not None and _stored(run_dir, "pretrain").exists())
        resume = resume or (there and (resume_if_there or world.restarts > 0))
        with world.fail_together():
            if run_dir is None and resume_if_there:
                raise ValueError("--resume-if-there needs --run-dir: which pipeline shall go on?")
            if run_dir is None and world.size > 1 and not print_config:
                raise ValueError("several processes need --run-dir: all write into one folder, and find it again")
            phases = _phases(config, run_dir, resume, overrides, token_cache)
        if print_config:
            for name, phase in phases.items() if world.is_main else ():
                print(f"# {name}\n{dump_config(phase)}")
            return
        folder = run_dir if run_dir is not None else new_run(config.stem if config else "pipeline").path
        runs = {name: RunFolder(folder / name) for name in PHASES}
        with world.fail_together():
            for name, phase in phases.items():  # a mistake in the second phase shall not show after hours of the first
                check_start(phase, runs[name], device=world.device, world=world, resume=runs[name].exists)
            if world.is_main:
                _prepare(phases, runs, folder, resume, verify)
        _run_phases(phases, runs, folder, world)


def _phases(
    config: Path | None, run_dir: Path | None, resume: bool, overrides: list[str], token_cache: Path | None
) -> dict[str, RunConfig]:
    """The configs of both phases, as asked for or as they were. Raises ValueError."""
    if resume and run_dir is None:
        raise ValueError("--resume needs --run-dir: which pipeline shall go on?")
    if token_cache is not None:
        overrides = [*overrides, f"data.token_cache={json.dumps(str(token_cache))}"]
    if resume and config is None and run_dir is not None:
        if overrides:
            raise ValueError("--resume goes on with the config of the pipeline: --set and --token-cache need --config")
        if not _stored(run_dir, "pretrain").exists():
            raise ValueError(f"nothing to resume: {run_dir} holds no pipeline")
        phases = {name: load_config(_stored(run_dir, name)) for name in PHASES}
    else:
        phases = load_pipeline(config, overrides=overrides)
    return {name: with_vocabulary(phase) for name, phase in phases.items()}


def _prepare(
    phases: dict[str, RunConfig], runs: dict[str, RunFolder], folder: Path, resume: bool, verify: bool
) -> None:
    """Refuse what cannot work, and write down what is to be done."""
    if not resume and any(run.exists for run in runs.values()):
        raise ValueError(f"{folder} holds a pipeline already: go on with --resume, or choose another --run-dir")
    for phase in phases.values():
        open_task(phase)
        if verify:
            verify_caches(phase)
    folder.mkdir(parents=True, exist_ok=True)
    for name, phase in phases.items():
        files.write_text(_stored(folder, name), dump_config(phase))


def _run_phases(phases: dict[str, RunConfig], runs: dict[str, RunFolder], folder: Path, world: World) -> None:
    """One phase after the other, but those that are finished."""
    tell = say if world.is_main else lambda text: None
    command = f"{program(world)} pipeline --run-dir {shlex.quote(str(folder))} --resume"
    for name in PHASES:
        run, phase = runs[name], phases[name]
        if name == "sft":
            phase = dataclasses.replace(phase, init_from=str(runs["pretrain"].best))
        begun = world.broadcast(run.exists)
        if begun and world.broadcast(world.is_main and _finished(run, phase)):
            tell(f"{name}: {run.path} is finished")
            continue
        tell(f"{name}: into {run.path}")
        result = train_and_report(phase, run, device=world.device, world=world, resume=begun)
        # A signal with the last update of pretraining must not be followed by the second phase.
        stopped = result.signal if name == "pretrain" else result.stopped_by
        exit_if_stopped(stopped, result, run, command=command, world=world)
    if world.is_main:
        _summary(runs)


def _stored(folder: Path, name: str) -> Path:
    """Where the config of a phase lies, also before its run begins."""
    return folder / f"{name}.yaml"


def _finished(run: RunFolder, config: RunConfig) -> bool:
    """Whether the last update is in a checkpoint (the metrics may be ahead of it)."""
    path, saved, _ = run.newest_checkpoint("cpu")
    return path is not None and saved["step"] >= config.train.total_steps and run.best.exists()


def _summary(runs: dict[str, RunFolder]) -> None:
    before, after = (_last_evals(runs[name]) for name in PHASES)
    if "val_pretrain" in before and "val_pretrain" in after:
        say(f"val_pretrain: {before['val_pretrain']:.3f} after pretraining, {after['val_pretrain']:.3f} after SFT")
    if "val_sft" in after:
        say(f"val_sft: {after['val_sft']:.3f}")
    for name, run in runs.items():
        say(f"best {name} checkpoint: {run.best}")
    place = shlex.quote(str(runs["sft"].path))
    say(f"next: niels-gpt chat --run {place}   niels-gpt eval --run {place}")


def _last_evals(run: RunFolder) -> dict[str, float]:
    found: dict[str, float] = next((line["evals"] for line in reversed(run.metrics()) if "evals" in line), {})
    return found
