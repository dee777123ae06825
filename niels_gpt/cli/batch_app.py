"""`niels-gpt batch`: the options."""

from __future__ import annotations

from typing import Annotated

import typer

from niels_gpt.cli.options import JsonOption, RunOption

app = typer.Typer(help="Look at what a training step learned from.", no_args_is_help=True)


@app.command("show")
def batch_show(
    step: Annotated[int, typer.Option("--step", min=0, help="Training step, from 0.")],
    run: RunOption = None,
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters of text per row; 0 for all.")] = 160,
    json: JsonOption = False,
) -> None:
    """Print source, document, offset and text of every row of a training step."""
    from niels_gpt.cli.eval import run_batch_show

    run_batch_show(run=run, step=step, chars=chars, as_json=json)
