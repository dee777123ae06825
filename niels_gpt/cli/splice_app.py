"""`niels-gpt splice`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.options import (
    Count,
    DeviceOption,
    GreedyOption,
    JsonOption,
    Place,
    PrimerOption,
    PromptOption,
    RoamOption,
    SetOption,
    StrideOption,
    WikiOption,
    WindowOption,
    output_option,
)

app = typer.Typer(help="Chosen documents at chosen positions: what a splice run will train on.", no_args_is_help=True)

ConfigOption = Annotated[Place, typer.Option("--config", help="YAML file of a splice run; default: notes, as bytes.")]
PngOption = Annotated[Place, output_option("--png", "Draw it into this file.")]
HtmlOption = Annotated[Place, output_option("--html", "Write it as a page.")]


@app.command("select")
def splice_select(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    json: JsonOption = False,
) -> None:
    """Show the candidates, their lengths, and what each policy would choose. Nothing is trained."""
    from niels_gpt.cli.splice import run_select

    run_select(config=config, overrides=list(set_), data={"wiki": wiki, "roam": roam, "primer": primer}, as_json=json)


@app.command("coverage")
def splice_coverage(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    steps: Annotated[Count, typer.Option("--steps", min=1, help="The first N steps, not one epoch.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many epochs.")] = 1,
    png: PngOption = None,
    html: HtmlOption = None,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    json: JsonOption = False,
) -> None:
    """Count how often each token of each document is seen and supervised, without a model."""
    from niels_gpt.cli.splice import run_coverage

    run_coverage(
        config=config,
        overrides=list(set_),
        data={"wiki": wiki, "roam": roam, "primer": primer},
        steps=steps,
        epochs=epochs,
        png=png,
        html=html,
        as_json=json,
    )


@app.command("study")
def splice_study(
    config: Annotated[Place, typer.Option("--config", help="YAML file of the first run; default: notes.")] = None,
    vary: Annotated[
        str, typer.Option("--vary", metavar="KEY=A,B,C", help="The value that differs from run to run.")
    ] = "splice.num_docs=1,2,4,8",
    out: Annotated[Path, output_option("--out", "Folder of the runs and the report.", folder=True)] = Path(
        "runs/study"
    ),
    window: WindowOption = None,
    prompt: PromptOption = None,
    stride: StrideOption = 5,
    greedy: GreedyOption = None,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Train one run per value, measure what each memorised, and fit log P(z) against epochs and tokens."""
    from niels_gpt.cli.splice import run_study

    run_study(
        config=config,
        overrides=list(set_),
        data={"wiki": wiki, "roam": roam, "primer": primer},
        vary=vary,
        out=out,
        wanted={"window": window, "prompt": prompt, "stride": stride, "greedy": greedy},
        device=device,
    )


@app.command("fit")
def splice_fit(
    runs: Annotated[list[Path], typer.Argument(help="Runs that `niels-gpt memorize` has measured.")],
    png: PngOption = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Fit log P(z) = c1 log(epochs) + c2 log(tokens) + c3 over the checkpoints of several runs."""
    from niels_gpt.cli.splice import run_fit

    run_fit(runs=runs, png=png, html=html, as_json=json)
