"""`niels-gpt data`: list the sources, show and count their samples, check the targets of SFT caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.groups import group
from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import (
    Count,
    JsonOption,
    OfflineOption,
    OptionalPath,
    PathOption,
    SourceConfigOption,
    SplitOption,
    SubsetOption,
    choice_option,
    output_option,
)
from niels_gpt.system.program import command
from niels_gpt.system.urls import location

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from niels_gpt.cache.sft_dataset import SFTExampleDataset
    from niels_gpt.config import DataConfig
    from niels_gpt.data.registry import Sample, Source
    from niels_gpt.data.statistics import Statistics
    from niels_gpt.tokenizer import SubwordTokenizer

app = App(help="Sources of text: which exist, and what is in them.", cls=group(moved={"lint": "research lint"}))

LARGE_TAKE = 10_000
"""Samples that `data stats` reads from a source too large to read completely."""
MOST_LENGTHS = 8
"""Numbers of turns that `data stats` lists."""
ROLE_COLORS = {"system": "yellow", "user": "cyan", "assistant": "green"}

SourceName = Annotated[str, typer.Argument(help="A source of `niels-gpt data list`, or the path of a file or folder.")]
FieldOption = Annotated[str, typer.Option("--field", metavar="COLUMN", help="Of a path: the column with the text.")]
ColumnsOption = Annotated[
    str,
    typer.Option("--columns", metavar="user=A,assistant=B", help="Of a path: the columns of prompts and replies."),
]


# --- list --------------------------------------------------------------------------------------------


@app.command("list")
def list_(config: SourceConfigOption = None, offline: OfflineOption = False, json: JsonOption = False) -> None:
    """List every source, and where it would be read from now."""
    from json import dumps

    from niels_gpt.data.registry import describe, sources

    rows = [describe(source) for source in sources(_data_config(config)).values()]
    if json:
        print(dumps(rows, indent=2, ensure_ascii=False))
        return
    keys = ("name", "kind", "from", "licence", "place")  # the place of a source on the Hub is its id
    cells = [
        ("name", "kind", "from", "licence", "path or id"),
        *(tuple(row[key] or "-" for key in keys) for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for cell in cells:  # do not wrap in a narrow terminal: names are there to be copied
        print("  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip())


# --- show --------------------------------------------------------------------------------------------


@app.command("show")
@takes_note_options
def show(
    name: SourceName,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many samples.")] = 3,
    split: SplitOption = "train",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Random samples instead of the first ones.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of --shuffle.")] = 42,
    subset: SubsetOption = None,
    path: PathOption = None,
    note_options: NoteOptions = NoteOptions(),
    config: SourceConfigOption = None,
    field: FieldOption = "",
    columns: ColumnsOption = "",
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters per text or message; 0 for all.")] = 400,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Print samples of a source; with --json, one per line.

    Chat files of the usual formats are recognized by their columns: `niels-gpt data show alpaca.jsonl`.
    """
    import dataclasses
    from json import dumps

    from niels_gpt.system.terminal import rich_console

    data = _data_config(config, note_options)
    source = _source(name, data, field, columns)
    _check_notes(source, path, data, note_options)
    samples = source.samples(
        subset=subset,
        split=split,
        take=number,
        shuffle=shuffle,
        seed=seed,
        path=path,
        errors=_errors(source, data, note_options),
        notes=data.notes,
    )
    console = rich_console(highlight=False)
    shown = 0
    if not json and (layout := source.layout(path, data.notes, data.encoding_errors)):
        console.print(f"{layout}\n", markup=False, soft_wrap=True)
    for shown, sample in enumerate(samples, start=1):
        if json:
            print(dumps(dataclasses.asdict(sample), ensure_ascii=False, default=str))
        else:
            if shown > 1:
                console.print()
            _print_sample(console, shown, sample, chars)
    if not shown:
        raise ValueError(f"{name}, split {split!r}: no sample was found")


def _print_sample(console: Console, number: int, sample: Sample, chars: int) -> None:
    from rich.text import Text

    from niels_gpt.data.types import ChatSample

    meta = {key: str(value).replace("\n", " ") for key, value in sample.meta.items() if value is not None}
    listed = "  ".join(f"{key}={_shorten(value, 60)}" for key, value in meta.items())
    console.print(Text(f"{number}. {sample.source}  {listed}", style="bold"), soft_wrap=True)
    if isinstance(sample, ChatSample):
        for message in sample.messages:
            console.print(Text(f"{message.role}: ", style=ROLE_COLORS[message.role]), end="", soft_wrap=True)
            console.print(Text(_shorten(message.content, chars)), soft_wrap=True)
    else:
        console.print(Text(_shorten(sample.text, chars)), soft_wrap=True)


def _shorten(text: str, chars: int) -> str:
    """Return the first `chars` characters with a note of the length; 0 keeps all."""
    return text if not chars or len(text) <= chars else f"{text[:chars]}... ({len(text):,} characters)"


# --- stats -------------------------------------------------------------------------------------------


@app.command("stats")
@takes_note_options
def stats(
    name: SourceName,
    take: Annotated[
        Count,
        typer.Option(
            "--take", min=1, help="Most samples to read; default: all, or 10,000 of a large source on the Hub."
        ),
    ] = None,
    split: SplitOption = "train",
    subset: SubsetOption = None,
    path: PathOption = None,
    note_options: NoteOptions = NoteOptions(),
    config: SourceConfigOption = None,
    field: FieldOption = "",
    columns: ColumnsOption = "",
    png: Annotated[OptionalPath, output_option("--png", "Also write a histogram of the lengths to this file.")] = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Count the samples, lengths, languages and roles of a source."""
    from json import dumps

    from niels_gpt.data.statistics import Statistics
    from niels_gpt.report.histogram import plot_histogram

    data = _data_config(config, note_options)
    source = _source(name, data, field, columns)
    _check_notes(source, path, data, note_options)
    name, layout = source.name, source.layout(path, data.notes, data.encoding_errors)
    if take is None and source.large and path is None and source.where().kind != "local":
        take = LARGE_TAKE
    dropped: dict[str, int] = {}
    samples = source.samples(
        subset=subset,
        split=split,
        take=take,
        path=path,
        errors=_errors(source, data, note_options),
        notes=data.notes,
        stats=dropped,
    )
    statistics = Statistics().add_all(_with_progress(samples, name))
    if not statistics.lengths:
        raise ValueError(f"{name}, split {split!r}: no sample was found")
    if png is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        plot_histogram(statistics.lengths, png, title=f"{name}, {split}: {len(statistics.lengths):,} samples")
    summary = {"source": name, "split": split, **({"format": layout} if layout else {}), **statistics.summary()}
    summary |= {"dropped": dropped, "png": None if png is None else str(png)}
    if json:
        print(dumps(summary, indent=2, ensure_ascii=False))
    else:
        _print_stats(source, summary, statistics, take=take)


def _with_progress(samples: Iterator[Sample], name: str) -> Iterator[Sample]:
    """Yield the samples; on a terminal show their number and rate."""
    import time

    from niels_gpt.system.console import is_quiet
    from niels_gpt.system.terminal import rich_console

    began = time.monotonic()
    with rich_console(stderr=True, quiet=is_quiet()).status(f"reading {name}") as status:
        for number, sample in enumerate(samples, start=1):
            if number % 1000 == 0:
                rate = number / max(time.monotonic() - began, 1e-9)
                status.update(f"reading {name}: {number:,} samples, {rate:,.0f} per second")
            yield sample


def _print_stats(source: Source, summary: dict[str, Any], statistics: Statistics, take: int | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    from niels_gpt.report.histogram import histogram_text
    from niels_gpt.system.console import short_number
    from niels_gpt.system.terminal import rich_console

    console = rich_console(highlight=False)
    first = f" (the first {take:,})" if take and summary["samples"] == take else ""
    console.print(f"[bold]{source.name}[/], {summary['split']}: {summary['samples']:,} samples{first}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("characters", f"{summary['characters']:,}  ({short_number(summary['bytes'])}B as utf-8)")
    lengths = "  ".join(f"{key} {value:,}" for key, value in summary["length_quantiles"].items())
    table.add_row("length", f"{lengths}  mean {summary['mean_length']:,}")
    if "format" in summary:
        table.add_row("format", escape(summary["format"]))
    if "languages" in summary:
        table.add_row("languages", "  ".join(f"{name}: {number:,}" for name, number in summary["languages"].items()))
    if "turns" in summary:
        table.add_row("turns", _turns_text(summary["turns"]))
    for role, counts in summary.get("roles", {}).items():
        table.add_row(role, f"{counts['messages']:,} messages, {counts['characters']:,} characters")
    for reason, number in summary["dropped"].items():
        table.add_row("dropped", f"{number:,} {reason}")
    console.print(table)
    console.print("\ncharacters per sample")
    for line in histogram_text(statistics.lengths, width=max(10, min(40, console.width - 40))):
        console.print(line, markup=False)
    if summary["png"]:
        console.print(f"\nhistogram: {escape(summary['png'])}")


def _turns_text(turns: Mapping[str, int]) -> str:
    """Return the number of turns, and how many samples have how many; the longest are counted together."""
    total = sum(int(length) * number for length, number in turns.items())
    shown = list(turns.items())[:MOST_LENGTHS]
    texts = [f"{length}: {number:,}" for length, number in shown]
    rest = sum(turns.values()) - sum(number for _, number in shown)
    return f"{total:,} in all; per sample  " + "  ".join([*texts, *([f"more: {rest:,}"] if rest else [])])


# --- lint --------------------------------------------------------------------------------------------


@app.command("lint")
def lint(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="SFT caches; default: all.")] = [],  # noqa: B006
    cache_dir: Annotated[
        Path, typer.Option("--cache-dir", parser=location, help="Folder of token caches, or its URL.")
    ] = Path("cache"),
    context: Annotated[
        int, typer.Option("-T", "--context", min=1, help="Context length that examples are cut to.")
    ] = 1024,
    split: Annotated[str, choice_option("--split", ("train", "val"), "train or val.")] = "train",
    example: Annotated[
        Count, typer.Option("--example", min=0, help="Index of the example to show; default: a random one.")
    ] = None,
    seed: Annotated[Count, typer.Option("--seed", min=0, help="Seed of the random example.")] = None,
    json: JsonOption = False,
) -> None:
    """Count the supervised tokens of SFT caches, and show an example.

    Exit code 1 if a cache has none.
    """
    import sys
    from json import dumps

    from niels_gpt.cache.folder import CacheFolder
    from niels_gpt.cache.formats import CacheError
    from niels_gpt.system.terminal import rich_console

    folder = CacheFolder(cache_dir)
    names = names or folder.names("sft")
    if not names:
        raise CacheError(f"no SFT cache in {folder.path}: build one with {command('cache', 'build', 'primer')}")
    folder.check("sft", names, option="NAME")
    datasets: dict[str, SFTExampleDataset] = {}
    refused: list[str] = []
    for name in names:
        try:
            datasets[name] = folder.sft(name, split, T=context)
        except CacheError as err:
            refused.append(str(err))
    rows = [{"cache": name, **dataset.target_counts()} for name, dataset in datasets.items()]
    name, dataset = next(iter(datasets.items()), ("", None))
    index = -1 if dataset is None else _choose_example(dataset, example, seed)
    if json:
        print(dumps({"T": context, "split": split, "caches": rows, "refused": refused}, indent=2, ensure_ascii=False))
    else:
        _print_target_counts(rows, context)
        if dataset is not None:
            print(f"\n{name}, {split} example {index}; supervised tokens are marked:")
            console = rich_console(highlight=False)
            text = mark_targets(dataset, index, folder.tokenizer, brackets=not console.is_terminal)
            console.print(text, soft_wrap=True)
    for problem in refused:
        print(f"error: {problem}", file=sys.stderr)
    if refused:
        raise typer.Exit(1)


def _choose_example(dataset: SFTExampleDataset, example: int | None, seed: int | None) -> int:
    """Return the index of the example to show: the one asked for, else a random one that has targets."""
    from niels_gpt.system.rng import seeded_or_random

    if example is None:
        return dataset.plan(1, seeded_or_random(seed))[0]
    if example >= dataset.num_examples:
        raise ValueError(f"--example must be in 0..{dataset.num_examples - 1}, got {example}")
    return example


def mark_targets(dataset: SFTExampleDataset, index: int, tokenizer: SubwordTokenizer, *, brackets: bool) -> Text:
    """Return an example as text, supervised tokens in green, and with `brackets` also in [[...]]."""
    import itertools

    from rich.text import Text

    tokens = dataset.example(index)[: dataset.T + 1].tolist()
    mask = dataset.mask(index)[: len(tokens)].tolist()
    text = Text()
    # Decode runs of tokens, not single ones: a character may consist of several tokens.
    for supervised, run in itertools.groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.render([token for token, _ in run])
        if supervised:
            text.append(f"[[{decoded}]]" if brackets else decoded, style="bold green")
        else:
            text.append(decoded, style="dim")
    return text


def _print_target_counts(rows: list[dict[str, Any]], T: int) -> None:
    from rich.table import Table

    from niels_gpt.cli.tables import show_table

    table = Table(box=None, pad_edge=False)
    table.add_column("cache")
    for name in ("examples", "without targets", f"cut at T={T}", "tokens", "supervised", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("examples", "without_targets", "cut", "seen", "supervised")]
        table.add_row(row["cache"], *counts, f"{row['share']:.1%}")
    show_table(table)


def _source(name: str, data: DataConfig, field: str, columns: str) -> Source:
    """Return the source of a name or a path. Raises ValueError for unknown names, columns and misused options."""
    from niels_gpt.data.registry import source_of_path, sources
    from niels_gpt.data.row_layout import UnknownColumns

    known = sources(data)
    if name in known or not Path(name).expanduser().exists():
        if field or columns:
            raise ValueError(
                f"--field and --columns describe a file or folder, but {name} is not one; for a source of a config set "
                "them there (data.sources.NAME)"
            )
        if name not in known:
            raise ValueError(f"no source {name!r}, and no such file or folder; known sources are {', '.join(known)}")
        return known[name]
    pairs = [item.partition("=") for item in columns.split(",")] if columns else []
    if not all(role.strip() in ("user", "assistant", "system") and column for role, _, column in pairs):
        raise ValueError(f"--columns takes user=COLUMN,assistant=COLUMN, optionally system=COLUMN, got {columns!r}")
    named = {role.strip(): column.strip() for role, _, column in pairs}
    source = source_of_path(name, field=field, columns=named, data=data)
    try:
        source.layout(None, data.notes, data.encoding_errors)
    except UnknownColumns as err:
        raise ValueError(
            f"{name}: {err.problem}: give --field COLUMN for texts, or --columns user=COLUMN,assistant=COLUMN for chats"
        ) from None
    return source


def _data_config(config: Path | None, options: NoteOptions | None = None) -> DataConfig:
    """Return `data` of a YAML file, or the default, with the options applied."""
    import dataclasses

    from niels_gpt.config.yaml_file import load_config

    data = load_config(config).data
    options = options or NoteOptions()
    errors: Any = options.encoding_errors or data.encoding_errors
    return dataclasses.replace(data, notes=options.notes(data.notes), encoding_errors=errors)


def _errors(source: Source, data: DataConfig, options: NoteOptions) -> str | None:
    """How files are decoded: by the option, else by the config where the source has files of text; None: strictly."""
    from_config = data.encoding_errors if source.decodes and data.encoding_errors != "strict" else None
    return options.encoding_errors or from_config


def _check_notes(source: Source, path: Path | None, data: DataConfig, options: NoteOptions) -> None:
    """Print what is read and skipped, to stderr, as stdout may be JSON. Raises ValueError for misused options."""
    import sys

    from niels_gpt.data.note_selection import selection_lines

    options.check_applies(source.name, source.select is not None)
    if source.select is not None:
        selected = source.select(path, data.notes, data.encoding_errors)
        if selected is not None and (selected.skipped or selected.unmatched) and not selected.is_embedded:
            for line in selection_lines({source.name: selected}):
                print(line, file=sys.stderr)
