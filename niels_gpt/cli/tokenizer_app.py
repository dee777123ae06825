"""`niels-gpt tokenizer`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.options import (
    JsonOption,
    OfflineOption,
    PathOption,
    SourceConfigOption,
    output_option,
)

app = typer.Typer(help="Train a tokenizer, and see how well it fits.", no_args_is_help=True)


@app.command("train")
def tokenizer_train(
    names: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Sources to learn from; default: all that can be read.")
    ] = [],  # noqa: B006
    out: Annotated[Path, output_option("--out", "Folder for spm.model and meta.json.", folder=True)] = Path(
        "cache/tokenizer"
    ),
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Pieces, without the special tokens.")] = 16_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seeds the sample that is learned from.")] = 42,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents per source, at most.")] = 20_000,
    path: PathOption = None,
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a tokenizer that is there.")] = False,
) -> None:
    """Train a SentencePiece tokenizer."""
    from niels_gpt.cli.tokenizer import run_train

    run_train(
        names=names,
        out=out,
        vocab_size=vocab_size,
        seed=seed,
        documents=documents,
        path=path,
        config=config,
        force=force,
    )


@app.command("report")
def tokenizer_report(
    names: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Sources to measure; default: all that can be read.")
    ] = [],  # noqa: B006
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="A spm.model, or its folder.")] = Path(
        "cache/tokenizer"
    ),
    take: Annotated[int, typer.Option("--take", min=1, help="Texts per source.")] = 2000,
    path: PathOption = None,
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Bytes per token by source, next to GPT-2's and to bytes; the longest pieces; pieces that are not used."""
    from niels_gpt.cli.tokenizer import run_report

    run_report(names=names, tokenizer=tokenizer, take=take, path=path, config=config, as_json=json)
