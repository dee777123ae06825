"""`niels-gpt demo`: train, evaluate, generate and chat, offline, on embedded text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import Count, DeviceOption, OptionalPath, PrimerOption, RoamOption, WikiOption
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.pipeline import PipelineFolder

STEPS = 1150
BYTE_STEPS = 1600
PROMPT = "A language model"
QUESTION = "what is niels?"


@takes_note_options
def demo(
    steps: Annotated[
        Count, typer.Option("--steps", min=2, help=f"Training steps; default: {STEPS}, or {BYTE_STEPS} with --bytes.")
    ] = None,
    run_dir: Annotated[
        OptionalPath, typer.Option("--run-dir", help="Run folder; default: runs/demo, runs/demo-2, ...")
    ] = None,
    bytes_: Annotated[
        bool, typer.Option("--bytes", help="A model over bytes, without a tokenizer: shorter, and it answers worse.")
    ] = False,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    note_options: NoteOptions = NoteOptions(),
    device: DeviceOption = "auto",
) -> None:
    """Train a small model and chat with it, offline.

    It takes three minutes on two fast cores, and six on two slow ones. The model first reads notes, then learns to
    answer from dialogues; the demo asks it questions that it has never seen, and prints how many of its answers are on
    topic.
    """
    import contextlib
    import time

    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.loading import claimed_run
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.system.console import format_duration
    from niels_gpt.system.device import resolve_device

    began = time.monotonic()
    device = resolve_device(device)
    if wiki is not None and not bytes_:
        raise ValueError("--wiki needs --bytes: the demo over subwords reads notes and dialogues only")
    with contextlib.nullcontext(RunFolder(run_dir)) if run_dir is not None else claimed_run("demo") as run:
        path = run.path
        if bytes_:
            _byte_demo(steps or BYTE_STEPS, run, wiki, roam, primer, note_options, device)
        else:
            _chat_demo(steps or STEPS, PipelineFolder(path), roam, primer, note_options, device)
    print(f"\nDone in {format_duration(time.monotonic() - began)}. Everything is in {path}. Try next:")
    print(f"  {command('serve', path)}")
    print(f"  {command('chat', path)}")
    print(f"  {command('eval', path, '--questions')}")
    print(f"  {command('notes')} ~/notes")  # not quoted: the shell expands it


def _chat_demo(
    steps: int, folder: PipelineFolder, roam: str | None, primer: str | None, note_options: NoteOptions, device: str
) -> None:
    """Train and show a model over subwords."""
    from rich.markup import escape

    from niels_gpt.cli.first_model import build_and_train, check_free, show_examination, show_scores_of
    from niels_gpt.data import embedded
    from niels_gpt.inference.generation import generate
    from niels_gpt.system.rng import generator
    from niels_gpt.system.terminal import rich_console
    from niels_gpt.workflow import plan as plans
    from niels_gpt.workflow.chat_model import dialogue_file, read_corpus

    console = rich_console(highlight=False)
    check_free(folder)
    notes = embedded.NOTES if roam in (None, "embedded") else Path(str(roam))
    corpus = read_corpus(notes, note_options.notes(), errors=note_options.encoding_errors or "strict")
    plan = plans.demo_plan(steps=steps, device=device)
    console.print(f"[bold]niels-gpt demo[/]: train a small GPT on this machine, into {escape(str(folder.path))}")
    console.print(plan.describe() + "\n", markup=False)
    trained = build_and_train(corpus, dialogue_file(primer), [], plan, folder, device=device)

    console.print("\n[bold]1. How well does it predict?[/]  Bits per byte of held-out notes; lower is better.")
    show_scores_of(trained)
    console.print(f"\n[bold]2. How does it write?[/]  A continuation of {PROMPT!r}, after pretraining:")
    text = generate(
        trained.writer.model,
        PROMPT,
        max_new_tokens=100,
        temperature=0.7,
        generator=generator(0, "demo"),
        tokenizer=trained.writer.tokenizer,
    )
    console.print(escape(text), style="green")
    console.print("\n[bold]3. How does it answer?[/]  After fine-tuning on dialogues:")
    show_examination(trained.chat)


def _byte_demo(
    steps: int,
    run: RunFolder,
    wiki: str | None,
    roam: str | None,
    primer: str | None,
    note_options: NoteOptions,
    device: str,
) -> None:
    """Train and show a model over bytes."""
    from rich.markup import escape

    from niels_gpt.cli.eval import show_scores
    from niels_gpt.cli.first_model import check_free, show_examination
    from niels_gpt.cli.train import exit_if_stopped, train_and_report
    from niels_gpt.config.yaml_file import with_data
    from niels_gpt.inference.generation import generate
    from niels_gpt.runs.loading import load_run
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.system.console import short_number
    from niels_gpt.system.device import has_fast_bf16
    from niels_gpt.system.rng import generator
    from niels_gpt.system.terminal import rich_console
    from niels_gpt.training.score_run import score_byte_streams

    console = rich_console(highlight=False)
    config = byte_demo_config(steps=steps, precision="bf16" if has_fast_bf16(device) else "fp32")
    data = {"wiki": wiki, "roam": roam, "primer": primer, **note_options.data()}
    config = with_data(config, data)
    check_free(PipelineFolder(run.path))
    console.print(f"[bold]niels-gpt demo[/]: train a small GPT over bytes, into {escape(str(run.path))}\n")
    result = train_and_report(config, run, device=device, show_samples=True)
    exit_if_stopped(result.stopped_by, result, run)

    loaded = load_run(run.path, None, device)
    size = short_number(loaded.model.num_parameters())
    console.print(f"\n[bold]1. How well does it predict?[/]  {size} parameters, {loaded.step} steps")
    console.print("Bits per byte on held-out text; lower is better.")
    show_scores(score_byte_streams(loaded, config), wiki=config.data.wiki)
    console.print(f"\n[bold]2. How does it write?[/]  A continuation of {PROMPT!r}:")
    text = generate(loaded.model, PROMPT, max_new_tokens=300, temperature=0.7, generator=generator(0, "demo"))
    console.print(escape(text), style="green")
    console.print("\n[bold]3. How does it answer?[/]")
    show_examination(loaded, most=64)


def byte_demo_config(*, steps: int = BYTE_STEPS, precision: str = "fp32") -> RunConfig:
    """Return the config of the demo over bytes: a quarter of v0's weights, Muon, half of the rows from dialogues."""
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
            "data": {"wiki": "embedded", "roam": "embedded", "primer": "embedded", "roam_split": "shared_text"},
            "output": {"checkpoint_every": 400, "eval_every": 200, "eval_steps": 10, "sample_every": 400},
        }
    )
