"""`niels-gpt demo`: train, evaluate, generate and chat, offline, on embedded text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import DeviceOption, OptionalPath, PrimerOption, RoamOption, WikiOption
from niels_gpt.data.note_options import NoteOptions, takes_note_options
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig

STEPS = 1600
PROMPT = "# Notes on "
QUESTION = "what is niels?"


@takes_note_options
def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = STEPS,
    run_dir: Annotated[
        OptionalPath, typer.Option("--run-dir", help="Run folder; default: runs/demo, runs/demo-2, ...")
    ] = None,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    note_options: NoteOptions = NoteOptions(),
    device: DeviceOption = "auto",
) -> None:
    """Train a small model and chat with it, offline.

    It takes two to three minutes on two fast cores, and also evaluates the model and continues a text.
    """
    import time

    from rich.console import Console
    from rich.markup import escape

    from niels_gpt.cli.eval import show_scores
    from niels_gpt.cli.train import exit_if_stopped, train_and_report
    from niels_gpt.config.yaml_file import with_data
    from niels_gpt.inference.conversation import Conversation
    from niels_gpt.inference.generation import generate
    from niels_gpt.inference.sampling import Sampling
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.loading import load_run, new_run
    from niels_gpt.system.console import format_duration, short_number
    from niels_gpt.system.device import has_fast_bf16, resolve_device
    from niels_gpt.system.rng import generator
    from niels_gpt.training.score_run import score_byte_streams

    began = time.monotonic()
    console = Console(highlight=False)
    device = resolve_device(device)
    config = demo_config(steps=steps, precision="bf16" if has_fast_bf16(device) else "fp32")
    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    config = with_data(config, data)
    run = RunFolder(run_dir) if run_dir is not None else new_run("demo")
    console.print(f"[bold]niels-gpt demo[/]: train a small GPT on this machine, into {escape(str(run.path))}\n")
    result = train_and_report(config, run, device=device)
    exit_if_stopped(result.stopped_by, result, run)

    loaded = load_run(run.path, None, device)
    size = short_number(loaded.model.num_parameters())
    console.print(f"\n[bold]1. How well does it predict?[/]  {size} parameters, {loaded.step} steps")
    console.print("Bits per byte on held-out text; lower is better. Compare the model with xz, gzip and the rest.")
    scores = score_byte_streams(loaded, config)
    show_scores(scores, wiki=config.data.wiki)

    console.print(f"\n[bold]2. How does it write?[/]  A continuation of {PROMPT!r}:")
    text = generate(loaded.model, PROMPT, max_new_tokens=300, temperature=0.7, generator=generator(0, "demo"))
    console.print(escape(text), style="green")

    console.print("\n[bold]3. How does it answer?[/]")
    conversation = Conversation(loaded.model, sampling=Sampling(temperature=0.0))
    console.print(f"you>   {QUESTION}")
    console.print(f"niels> {escape(''.join(conversation.reply(QUESTION)))}", style="green")

    print(f"\nDone in {format_duration(time.monotonic() - began)}. Everything is in {run.path}. Try next:")
    print(f"  {command('chat', run.path)}")
    print(f"  {command('batch', 'show', run.path, '--step', '100')}")
    print(f"  {command('train', '--notes')} ~/notes")


def demo_config(*, steps: int = STEPS, precision: str = "fp32") -> RunConfig:
    """Return the config of the demo: a quarter of v0's weights, Muon, and half of the rows from dialogues.

    It answers questions after two or three minutes of training.
    """
    from niels_gpt.config.yaml_file import config_from_dict

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
                "p_train": {"wiki": 0.27, "roam": 0.18, "primer": 0.55},
                "p_val": {"wiki": 0.3, "roam": 0.3, "primer": 0.4},
            },
            "data": {"wiki": "embedded", "roam": "embedded", "primer": "embedded"},
            "output": {"checkpoint_every": 400, "eval_every": 200, "eval_steps": 10, "sample_every": 400},
        }
    )
