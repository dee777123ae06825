"""The options of `niels-gpt memorize` and `niels-gpt audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.options import (
    CheckpointOption,
    Count,
    DeviceOption,
    EncodingOption,
    GreedyOption,
    JsonOption,
    OptionalPath,
    PromptOption,
    RunOption,
    StrideOption,
    Text,
    TokenizerOption,
    WindowOption,
    output_option,
)


def memorize(
    target: Annotated[
        OptionalPath, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint: a .pt, a sharded one.")
    ] = None,
    run: RunOption = None,
    checkpoint: CheckpointOption = None,
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    greedy: GreedyOption = None,
    whole_window: Annotated[
        bool, typer.Option("--whole-window", help="Map the whole window of each passage, not only its suffix.")
    ] = False,
    source: Annotated[Text, typer.Option("--source", help="Look into this source; default: as the run.")] = None,
    documents: Annotated[Count, typer.Option("--documents", min=1, help="Training documents to measure.")] = None,
    controls: Annotated[Count, typer.Option("--controls", min=0, help="Held-out documents beside them.")] = None,
    select: Annotated[str, typer.Option("--select", help="Which: random, first, longest or shortest.")] = "random",
    text: Annotated[list[Path], typer.Option("--text", help="Measure this file; may be repeated.")] = [],  # noqa: B006
    control: Annotated[
        list[Path], typer.Option("--control", help="A file that was never trained on; may be repeated.")
    ] = [],  # noqa: B006
    encoding_errors: EncodingOption = None,
    curve: Annotated[bool, typer.Option("--curve/--no-curve", help="Also at every checkpoint the run has.")] = True,
    out: Annotated[
        OptionalPath, output_option("--out", "Folder of the report; default: memorization/ of the run.", folder=True)
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Passages to list.")] = 20,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what a model can recite of its training documents, beside held-out ones."""
    from niels_gpt.cli.memorize import run_memorize

    run_memorize(
        target=target,
        run=run,
        checkpoint=checkpoint,
        device=device,
        tokenizer=tokenizer,
        wanted={"window": window, "prompt": prompt, "stride": stride, "greedy": greedy, "whole_window": whole_window},
        encoding_errors=encoding_errors or "strict",
        source=source,
        number=documents,
        controls=controls,
        select=select,
        texts=text,
        control_texts=control,
        curve=curve,
        out=out,
        top=top,
        as_json=json,
    )


def audit(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (.pt), or a run folder.")],
    notes: Annotated[Path, typer.Option("--notes", help="The folder of notes to look for.")],
    control: Annotated[
        OptionalPath,
        typer.Option("--control", help="A folder of notes that were never trained on, beside the held-out ones."),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="A passage with this P(z) or more is not safe to publish.")
    ] = 0.001,
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    top: Annotated[int, typer.Option("--top", min=1, help="Passages to list.")] = 10,
    out: Annotated[
        OptionalPath, output_option("--out", "Folder for a report with pages and tables.", folder=True)
    ] = None,
    encoding_errors: EncodingOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Which passages of my notes can this checkpoint recite? Exit code 0: none, safe to publish; 3: some."""
    from niels_gpt.cli.audit import run_audit

    run_audit(
        checkpoint=checkpoint,
        notes=notes,
        control=control,
        threshold=threshold,
        wanted={"window": window, "prompt": prompt, "stride": stride, "greedy": 0},
        top=top,
        out=out,
        encoding_errors=encoding_errors or "strict",
        device=device,
        tokenizer=tokenizer,
        as_json=json,
    )
