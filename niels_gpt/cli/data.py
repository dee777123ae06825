"""`niels-gpt data`: which sources there are, what is in them, what they are like."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from niels_gpt.config import DataConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.registry import Sample, Source, describe, get_source, sources
from niels_gpt.data.statistics import Statistics
from niels_gpt.data.types import ChatSample
from niels_gpt.report.histogram import histogram_text, plot_histogram
from niels_gpt.system.console import short_number

LARGE_TAKE = 10_000
"""Samples that `data stats` looks at in a source that is too large to read whole."""
_COLOURS = {"system": "yellow", "user": "cyan", "assistant": "green"}


def run_list(*, config: Path | None, as_json: bool) -> None:
    rows = [describe(source) for source in sources(_data(config)).values()]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    keys = ("name", "kind", "from", "licence", "id", "place")
    cells = [keys, *(tuple(_place(row, key) for key in keys) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for cell in cells:  # whole names, whatever the width of the terminal: they are there to be copied
        print("  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip())


def run_show(
    *,
    name: str,
    number: int,
    split: str,
    shuffle: bool,
    seed: int,
    subset: str | None,
    path: Path | None,
    errors: str | None,
    config: Path | None,
    chars: int,
    as_json: bool,
) -> None:
    source = get_source(name, _data(config))
    console = Console(highlight=False)
    shown = 0
    samples = source.samples(
        subset=subset, split=split, take=number, shuffle=shuffle, seed=seed, path=path, errors=errors
    )
    for sample in samples:
        if as_json:
            print(json.dumps(dataclasses.asdict(sample), ensure_ascii=False, default=str))
        else:
            if shown:
                console.print()
            _show(console, shown + 1, sample, chars)
        shown += 1
    if not shown:
        raise ValueError(f"{name}, split {split!r}: no sample was found")


def run_stats(
    *,
    name: str,
    take: int | None,
    split: str,
    subset: str | None,
    path: Path | None,
    errors: str | None,
    config: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    source = get_source(name, _data(config))
    if take is None and source.large and path is None and source.where().kind != "local":
        take = LARGE_TAKE
    left_out: dict[str, int] = {}
    samples = source.samples(subset=subset, split=split, take=take, path=path, errors=errors, stats=left_out)
    statistics = Statistics().add_all(_counting(samples, name))
    if not statistics.lengths:
        raise ValueError(f"{name}, split {split!r}: no sample was found")
    png = png or Path("data") / "stats" / f"{name}.png"
    png.parent.mkdir(parents=True, exist_ok=True)
    plot_histogram(statistics.lengths, png, title=f"{name}, {split}: {len(statistics.lengths):,} samples")
    summary = {"source": name, "split": split, **statistics.summary(), "left_out": left_out, "png": str(png)}
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        _show_stats(source, summary, statistics, first=take)


def _place(row: Mapping[str, str | None], key: str) -> str:
    """A cell of the list; for what comes from the Hub the place is the id, which stands there already."""
    return "" if key == "place" and row["from"] == "hub" else row[key] or "-"


def _counting(samples: Iterator[Sample], name: str) -> Iterator[Sample]:
    """The same samples, with their number and rate on a terminal."""
    began, console = time.monotonic(), Console(stderr=True)
    with console.status(f"reading {name}") as status:
        for number, sample in enumerate(samples, start=1):
            if number % 1000 == 0:
                rate = number / max(time.monotonic() - began, 1e-9)
                status.update(f"reading {name}: {number:,} samples, {rate:,.0f} a second")
            yield sample


def _show(console: Console, number: int, sample: Sample, chars: int) -> None:
    known = {key: value for key, value in sample.meta.items() if value is not None}
    meta = "  ".join(f"{key}={_short(value)}" for key, value in known.items())
    console.print(Text(f"{number}. {sample.source}  {meta}", style="bold"), soft_wrap=True)
    if isinstance(sample, ChatSample):
        for message in sample.messages:
            console.print(Text(f"{message.role}: ", style=_COLOURS[message.role]), end="", soft_wrap=True)
            console.print(Text(_cut(message.content, chars)), soft_wrap=True)
    else:
        console.print(Text(_cut(sample.text, chars)), soft_wrap=True)


def _cut(text: str, chars: int) -> str:
    return text if not chars or len(text) <= chars else f"{text[:chars]}... ({len(text):,} characters)"


def _short(value: Any) -> str:
    return _cut(str(value).replace("\n", " "), 60)


def _show_stats(source: Source, summary: dict[str, Any], statistics: Statistics, first: int | None) -> None:
    console = Console(highlight=False)
    part = f" (the first {first:,})" if first and summary["samples"] == first else ""
    console.print(f"[bold]{source.name}[/], {summary['split']}: {summary['samples']:,} samples{part}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("characters", f"{summary['characters']:,}  ({short_number(summary['bytes'])}B as utf-8)")
    lengths = "  ".join(f"{key} {value:,}" for key, value in summary["length_quantiles"].items())
    table.add_row("length", f"{lengths}  mean {summary['mean_length']:,}")
    for key in ("languages", "turns"):
        if key in summary:
            table.add_row(key, "  ".join(f"{name}: {number:,}" for name, number in summary[key].items()))
    for role, numbers in summary.get("roles", {}).items():
        table.add_row(role, f"{numbers['messages']:,} messages, {numbers['characters']:,} characters")
    for reason, number in summary["left_out"].items():
        table.add_row("left out", f"{number:,} {reason}")
    console.print(table)
    console.print("\ncharacters per sample")
    for line in histogram_text(statistics.lengths, width=max(10, min(40, console.width - 40))):
        console.print(line, markup=False)
    console.print(f"\nthe same as a picture: {escape(summary['png'])}")


def _data(config: Path | None) -> DataConfig | None:
    return load_config(config).data if config else None
