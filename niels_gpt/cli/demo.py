"""`niels-gpt demo`: the whole path on text that is already there."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from niels_gpt.cli.eval import score_all, show_scores
from niels_gpt.cli.train import exit_if_stopped, train_and_report, with_data
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.inference.conversation import Conversation
from niels_gpt.inference.generation import generate
from niels_gpt.inference.sampling import Sampling
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun, new_run
from niels_gpt.system.console import format_duration, short_number
from niels_gpt.system.device import has_fast_bf16, resolve_device
from niels_gpt.system.rng import generator

STEPS = 1600
QUESTION = "what is niels?"


def demo_config(*, steps: int = STEPS, precision: str = "fp32") -> RunConfig:
    """A quarter of v0's weights, Muon, and many rows from the dialogues: it answers after two or three minutes."""
    shares = {"wiki": 0.27, "roam": 0.18, "primer": 0.55}
    return config_from_dict(
        {
            "model": {"C": 128, "L": 4, "H": 2, "T": 256, "dropout": 0.05},
            "train": {
                "total_steps": steps,
                "warmup_steps": min(50, steps - 1),
                "base_lr": 0.01,
                "min_lr": 0.0005,
                "B": 8,
                "optimizer": "muon",
                "precision": precision,
                "p_train": shares,
                "p_val": {"wiki": 0.3, "roam": 0.3, "primer": 0.4},
            },
            "data": {"wiki": "embedded", "roam": "embedded", "primer": "embedded", "cache_dir": "data/cache/demo"},
            "output": {"checkpoint_every": 400, "eval_every": 200, "eval_steps": 10, "sample_every": 400},
        }
    )


def run_demo(
    *, steps: int | None, run_dir: Path | None, wiki: str | None, roam: str | None, primer: str | None, device: str
) -> None:
    """Train, show the loss table, a sample and a chat exchange, and say what to try next."""
    began = time.monotonic()
    console = Console(highlight=False)
    device = resolve_device(device)
    precision = "bf16" if has_fast_bf16(device) else "fp32"
    config = demo_config(steps=steps or STEPS, precision=precision)
    config = with_data(config, {"wiki": wiki, "roam": roam, "primer": primer})
    run = RunFolder(run_dir) if run_dir is not None else new_run("demo")
    console.print(f"[bold]niels-gpt demo[/]: a small GPT, trained here and now, into {escape(str(run.path))}\n")
    result = train_and_report(config, run, device=device)
    exit_if_stopped(result.stopped_by, result, run)

    model, step = load_model(run.best, device)
    console.print(
        f"\n[bold]1. How well does it predict?[/]  {short_number(model.num_parameters())} parameters, {step} updates"
    )
    console.print("Bits per byte on text it has never seen; less is better. The model beats a tool where it is lower.")
    show_scores(score_all(LoadedRun(model, step, run.best, run), data={}))

    console.print("\n[bold]2. How does it write?[/]  A continuation of '# Notes on ':")
    text = generate(model, "# Notes on ", max_new_tokens=300, temperature=0.7, generator=generator(0, "demo"))
    console.print(escape(text), style="green")

    console.print("\n[bold]3. How does it talk?[/]")
    talk = Conversation(model, sampling=Sampling(temperature=0.0))
    console.print(f"you>   {QUESTION}")
    console.print(f"niels> {escape(''.join(talk.reply(QUESTION)))}", style="green")

    place = shlex.quote(str(run.path))
    print(f"\nDone in {format_duration(time.monotonic() - began)}. Everything is in {run.path}. Try next:")
    print(f"  niels-gpt chat --run {place}")
    print(f"  niels-gpt batch show --run {place} --step 100")
    print("  niels-gpt train --roam ~/notes")
