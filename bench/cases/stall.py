"""The cost of batches in training: v0 on two embedded sources, beside the same steps on one resident batch.

On CUDA this runs `train`, and the stall is the one in metrics.jsonl: the share of time in which the device was idle. On
a CPU, where nothing is prefetched, it is the share of a step that is spent on building its batch. The first steps,
which compile the model, do not count.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from bench.case import Case, Contender, Work, temporary_folder
from bench.models import V0, our_config

STEPS, SKIPPED = {"cpu": 4, "cuda": 1000}, {"cpu": 0, "cuda": 100}


def _config(device: str, quick: bool, total: int) -> Any:
    from niels_gpt.config import DataConfig, EngineConfig, OutputConfig, RunConfig, TrainConfig

    rows = 2 if quick else {"cpu": 8, "cuda": 256}[device]
    precision: Literal["bf16", "fp32"] = "bf16" if device == "cuda" else "fp32"
    return RunConfig(
        model=our_config(V0.scaled(quick)),
        train=TrainConfig(
            total_steps=total,
            warmup_steps=0,
            B=rows,
            precision=precision,
            accumulate=1,
            p_train={"roam": 0.9, "primer": 0.1},
            p_val={"roam": 1.0},
        ),
        data=DataConfig(roam="embedded", primer="embedded", cache_dir=str(temporary_folder())),
        output=OutputConfig(checkpoint_every=10**6, eval_every=10**6, eval_steps=1, sample_every=0, sample_tokens=1),
        engine=EngineConfig(compile=False if quick else None),
    )


def _count(device: str, quick: bool) -> tuple[int, int]:
    """Return (steps, how many of the first of them do not count)."""
    return (8, 4) if quick and device == "cuda" else (2, 0) if quick else (STEPS[device], SKIPPED[device])


def _training(device: str, quick: bool) -> Work:
    steps, skipped = _count(device, quick)
    config = _config(device, quick, steps)
    tokens = config.train.B * config.model.T
    if device == "cpu":
        return Work(_cpu_loop(config, steps), tokens * steps, measures=True)

    def run() -> dict[str, float]:
        from niels_gpt.runs.folder import RunFolder
        from niels_gpt.training.loop import train

        run_folder = RunFolder(temporary_folder())
        train(config, run_folder, device=device)
        lines = run_folder.metrics()[skipped:]
        seconds = [tokens / line["tokens_per_s"] for line in lines]
        idle = sum(line["stall"] * s for line, s in zip(lines, seconds, strict=True))
        return {"seconds": sum(seconds), "% stall": 100 * idle / sum(seconds)}

    return Work(run, tokens * (steps - skipped), measures=True, warm=False)


def _cpu_loop(config: Any, steps: int) -> Any:
    from niels_gpt.training.tasks.registry import open_task

    task, runner = open_task(config), _runner(config, "cpu")

    def run() -> dict[str, float]:
        building = 0.0
        began = time.perf_counter()
        for step in range(steps):
            started = time.perf_counter()
            batch = task.batch(step)
            building += time.perf_counter() - started
            runner.step(batch, step=step, lr=3e-4)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "% stall": 100 * building / seconds}

    return run


def _runner(config: Any, device: str) -> Any:
    import torch

    from niels_gpt import GPT
    from niels_gpt.training.optim.optimizer import make_optimizer
    from niels_gpt.training.step import StepRunner

    torch.manual_seed(0)
    model = GPT(config.model).to(device)
    return StepRunner(model, make_optimizer(model, config.train), config, device)


def _resident(device: str, quick: bool) -> Work:
    import torch

    from niels_gpt.training.tasks.registry import open_task

    steps, skipped = _count(device, quick)
    config = _config(device, quick, steps)
    runner, batch = _runner(config, device), open_task(config).batch(0).to(torch.device(device))
    counted = steps - skipped

    def run() -> dict[str, float]:
        for step in range(skipped):
            runner.step(batch, step=step, lr=3e-4)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(counted):
            runner.step(batch, step=step, lr=3e-4)
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began}

    return Work(run, config.train.B * config.model.T * counted, measures=True)


def _case(device: str) -> Case:
    ours = Contender("training", lambda quick: _training(device, quick), role="ours", goals={"% stall": "≤ 1"})
    beside = Contender("one resident batch", lambda quick: _resident(device, quick))
    return Case("stall", "tokens/s", (ours, beside), device, rounds=9 if device == "cpu" else 2, starts=1)


CASES = tuple(map(_case, ("cpu", "cuda")))
