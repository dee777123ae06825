"""`niels-gpt pipeline`: pretrain, then fine-tune for chat, each with its own best checkpoint."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from niels_gpt.cli.runs import new_run
from niels_gpt.cli.training import exit_if_stopped, train_and_report
from niels_gpt.config import RunConfig
from niels_gpt.config_file import dump_config, load_pipeline
from niels_gpt.device import resolve_device
from niels_gpt.train.run_folder import RunFolder
from niels_gpt.train.token_task import verify_caches, with_vocabulary

PHASES = ("pretrain", "sft")


def run_pipeline(
    *,
    config: Path | None,
    run_dir: Path | None,
    resume: bool,
    overrides: list[str],
    token_cache: Path | None,
    device: str,
    print_config: bool,
    verify: bool,
) -> None:
    """Run both phases, or go on with them; on a signal, save, say how to go on, and exit with 128 + its number."""
    if resume and run_dir is None:
        raise ValueError("--resume needs --run-dir: which pipeline shall go on?")
    if resume and config is None:
        raise ValueError("--resume needs --config: that of the pipeline")
    if token_cache is not None:
        overrides = [*overrides, f"data.token_cache={token_cache}"]
    phases = {name: with_vocabulary(phase) for name, phase in load_pipeline(config, overrides=overrides).items()}
    if print_config:
        for name, phase in phases.items():
            print(f"# {name}\n{dump_config(phase)}")
        return
    for phase in phases.values() if verify else ():
        verify_caches(phase)
    folder = run_dir if run_dir is not None else new_run(config.stem if config else "pipeline").path
    runs = {name: RunFolder(folder / name) for name in PHASES}
    if not resume and any(run.exists for run in runs.values()):
        raise ValueError(f"{folder} holds a pipeline already: go on with --resume, or choose another --run-dir")
    device = resolve_device(device)
    command = f"niels-gpt pipeline --run-dir {shlex.quote(str(folder))} --resume"
    command += f" --config {shlex.quote(str(config))}" if config else ""
    before = after = None
    for name in PHASES:
        run, phase = runs[name], phases[name]
        if name == "sft":
            phase = dataclasses.replace(phase, init_from=str(runs["pretrain"].best))
        if run.exists and _finished(run, phase):
            print(f"{name}: {run.path} is finished")
            continue
        print(f"{name}: into {run.path}")
        result = train_and_report(phase, run, device=device, resume=run.exists)
        exit_if_stopped(result, run, command=command)
        if name == "pretrain":
            before = result.evals
        else:
            after = result.evals
    _summary(runs, before, after)


def _finished(run: RunFolder, config: RunConfig) -> bool:
    metrics = run.metrics()
    return bool(metrics) and metrics[-1]["step"] + 1 >= config.train.total_steps and run.best.exists()


def _summary(runs: dict[str, RunFolder], before: dict[str, float] | None, after: dict[str, float] | None) -> None:
    if before and after:
        if "val_pretrain" in after:
            print(
                f"val_pretrain: {before['val_pretrain']:.3f} after pretraining, {after['val_pretrain']:.3f} after SFT"
            )
        print(f"val_sft: {after['val_sft']:.3f}")
    for name, run in runs.items():
        print(f"best {name} checkpoint: {run.best}")
    place = shlex.quote(str(runs["sft"].path))
    print(f"next: niels-gpt chat --run {place}   niels-gpt eval --run {place}")
