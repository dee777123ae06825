"""`niels-gpt data`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niels_gpt.cli.options import (
    Count,
    EncodingOption,
    JsonOption,
    OfflineOption,
    PathOption,
    Place,
    SourceConfigOption,
    SplitOption,
    SubsetOption,
    output_option,
)

app = typer.Typer(help="The sources of text: which there are, and what is in them.", no_args_is_help=True)


@app.command("list")
def data_list(config: SourceConfigOption = None, offline: OfflineOption = False, json: JsonOption = False) -> None:
    """Name, kind, id and licence of every source, and where it would come from now."""
    from niels_gpt.cli.data import run_list

    run_list(config=config, as_json=json)


@app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A source of `niels-gpt data list`.")],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many samples.")] = 3,
    split: SplitOption = "train",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Not the first ones.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For --shuffle.")] = 42,
    subset: SubsetOption = None,
    path: PathOption = None,
    encoding_errors: EncodingOption = None,
    config: SourceConfigOption = None,
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters per text or message; 0 for all.")] = 400,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Print samples of a source; with --json one per line."""
    from niels_gpt.cli.data import run_show

    run_show(
        name=name,
        number=number,
        split=split,
        shuffle=shuffle,
        seed=seed,
        subset=subset,
        path=path,
        errors=encoding_errors,
        config=config,
        chars=chars,
        as_json=json,
    )


@app.command("stats")
def data_stats(
    name: Annotated[str, typer.Argument(help="A source of `niels-gpt data list`.")],
    take: Annotated[
        Count, typer.Option("--take", min=1, help="Only so many samples; default: all, or 10,000 of a huge one.")
    ] = None,
    split: SplitOption = "train",
    subset: SubsetOption = None,
    path: PathOption = None,
    encoding_errors: EncodingOption = None,
    config: SourceConfigOption = None,
    png: Annotated[Place, output_option("--png", "Where to write the histogram; default: data/stats/NAME.png.")] = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Samples, characters, languages, lengths, roles and turns of a source."""
    from niels_gpt.cli.data import run_stats

    run_stats(
        name=name,
        take=take,
        split=split,
        subset=subset,
        path=path,
        errors=encoding_errors,
        config=config,
        png=png,
        as_json=json,
    )


@app.command("lint")
def data_lint(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="SFT caches; default: all.")] = [],  # noqa: B006
    cache_dir: Annotated[Path, typer.Option("--cache-dir", help="Folder of token caches.")] = Path("cache"),
    context: Annotated[
        int, typer.Option("-T", "--context", min=1, help="Context length that examples are cut to.")
    ] = 1024,
    split: Annotated[str, typer.Option("--split", help="train or val.")] = "train",
    example: Annotated[
        Count, typer.Option("--example", min=0, help="Which example to show; default: a random one.")
    ] = None,
    seed: Annotated[Count, typer.Option("--seed", min=0, help="For the same example again.")] = None,
    json: JsonOption = False,
) -> None:
    """Count the supervised tokens of every SFT cache, show one example, refuse data without any."""
    from niels_gpt.cli.data_lint import run_lint

    if split not in ("train", "val"):
        raise ValueError(f"--split must be train or val, got {split!r}")
    run_lint(names=names, cache_dir=cache_dir, T=context, split=split, example=example, seed=seed, as_json=json)
