"""`niels-gpt tokenizer`: train a SentencePiece tokenizer, and report how well it compresses each source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niels_gpt.cli.command_line import App
from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import (
    JsonOption,
    OfflineOption,
    PathOption,
    SourceConfigOption,
    output_option,
)
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.data.registry import Source
    from niels_gpt.tokenizer.compression import Compression

app = App(help="Train a tokenizer, and measure how well it compresses.")

GPT2_BYTES_PER_TOKEN = 4.0
"""Often quoted for GPT-2's tokenizer (50,257 subwords) on English text."""
LONGEST_SHOWN, UNUSED_SHOWN = 12, 24


@app.command("train")
@takes_note_options
def train(
    names: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Sources to train on; default: all that can be read.")
    ] = [],  # noqa: B006
    out: Annotated[Path, output_option("--out", "Folder for spm.model and meta.json.", folder=True)] = Path(
        "cache/tokenizer"
    ),
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", help="Subwords to learn, without the special tokens.")
    ] = 16_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sample of documents.")] = 42,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Most documents to read per source.")] = 20_000,
    path: PathOption = None,
    note_options: NoteOptions = NoteOptions(),
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing tokenizer.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a SentencePiece tokenizer."""
    import time
    from json import dumps

    from niels_gpt.cache.sources.build import choose_sources, train_on
    from niels_gpt.cache.sources.texts import BuildSettings, selections_of_sources
    from niels_gpt.cli.train import show_next
    from niels_gpt.config.yaml_file import load_config
    from niels_gpt.data.note_selection import record_skipped, selection_lines
    from niels_gpt.system.console import format_duration, is_quiet
    from niels_gpt.system.progress import status_line

    _check_path(path, names)
    if (out / "spm.model").exists() and not force:
        raise ValueError(
            f"{out} already has a tokenizer, and caches may depend on it: choose another --out, or use --force"
        )
    data = load_config(config).data
    settings = BuildSettings(
        cache_dir=out.parent,
        seed=seed,
        vocab_size=vocab_size,
        path=path,
        tokenizer_documents=documents,
        errors=note_options.encoding_errors or data.encoding_errors,
        notes=note_options.notes(data.notes),
    )
    chosen = choose_sources(names or None, [], [], config, settings)
    began = time.monotonic()
    skipped: list[str] = []

    def skip(source: Source, err: Exception) -> None:
        if names:  # the user asked for this source
            raise err
        skipped.append(source.name)
        _warn_skipped(source, err)

    selections = selections_of_sources(chosen, settings)
    for line in () if json or is_quiet() else selection_lines(selections):
        print(line)
    try:
        with status_line(f"training a tokenizer of {vocab_size:,} subwords") as show:
            trained = train_on(chosen, settings, skip, out=out, show=show)
    except KeyboardInterrupt:
        kept = "; the tokenizer there is unchanged" if (out / "spm.model").exists() else ""
        typer.echo(f"\ninterrupted: nothing was written to {out}{kept}", err=True)
        raise
    if selections:
        record_skipped(out / "skipped.json", selections)
    if json:
        found = {"tokenizer": str(out / "spm.model"), "sha256": trained.sha256, "vocab_size": trained.vocab_size}
        print(dumps(found | {"skipped": skipped}, indent=2, ensure_ascii=False))
        return
    seconds = format_duration(time.monotonic() - began)
    print(f"{out / 'spm.model'}: {trained.vocab_size:,} ids, sha256 {trained.sha256[:12]}..., in {seconds}")
    read = [source.name for source in chosen if source.name not in skipped]
    options = {"--tokenizer": out, "--path": path, "--config": config}
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    show_next(command("tokenizer", "report", *read, *map(str, given), *note_options.words()))


@app.command("report")
@takes_note_options
def report(
    names: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Sources to measure; default: all that can be read.")
    ] = [],  # noqa: B006
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="spm.model or tokenizer.json, or its folder.")] = Path(
        "cache/tokenizer"
    ),
    take: Annotated[int, typer.Option("--take", min=1, help="Most texts to read per source.")] = 2000,
    path: PathOption = None,
    note_options: NoteOptions = NoteOptions(),
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Report bytes per token, the longest and the unused subwords."""
    import itertools
    from json import dumps

    import numpy as np

    from niels_gpt.cache.sources.build import choose_sources
    from niels_gpt.cache.sources.texts import BuildSettings, training_texts
    from niels_gpt.config.yaml_file import load_config
    from niels_gpt.system.progress import status_line
    from niels_gpt.tokenizer import load_tokenizer
    from niels_gpt.tokenizer.compression import measure_compression, multi_byte_subwords

    _check_path(path, names)
    loaded = load_tokenizer(tokenizer)
    data = load_config(config).data
    settings = BuildSettings(
        cache_dir=Path(),
        path=path,
        errors=note_options.encoding_errors or data.encoding_errors,
        notes=note_options.notes(data.notes),
    )
    rows: list[dict[str, Any]] = []
    used = np.zeros(loaded.vocab_size, dtype=np.int64)
    for source in choose_sources(names or None, [], [], config, settings):
        try:
            with status_line(f"measuring {source.name}"):
                found = measure_compression(loaded, itertools.islice(training_texts(source, settings), take))
            if found is None:
                raise ValueError(f"{source.name} has no text")
        except (OSError, ValueError) as err:
            if names:
                raise
            _warn_skipped(source, err)
            continue
        rows.append(_row(source.name, found))
        used += found.counts
    if not rows:
        raise ValueError(f"no source could be read: name one that is available ({command('data', 'list')})")
    subwords = multi_byte_subwords(loaded)
    unused = sorted(i for i in subwords if not used[i])
    measured = {
        "tokenizer": str(tokenizer),
        "sha256": loaded.sha256,
        "vocab_size": loaded.vocab_size,
        "lossy": loaded.lossy,
        "sources": rows,
        "longest_pieces": [loaded.decode([i]) for i in subwords[:LONGEST_SHOWN]],
        "unused_pieces": len(unused),
        "unused_examples": [loaded.decode([i]) for i in unused[:UNUSED_SHOWN]],
    }
    if json:
        print(dumps(measured, indent=2, ensure_ascii=False))
    else:
        _print_report(measured)


def _check_path(path: Path | None, names: list[str]) -> None:
    """Raise ValueError if a local path would be read as several sources."""
    if path is not None and len(names) != 1:
        raise ValueError(f"--path {path} needs exactly one SOURCE, got {len(names)}: name the source that it holds")


def _warn_skipped(source: Source, err: Exception) -> None:
    import sys

    from niels_gpt.system.console import error_message

    print(f"warning: skipping {source.name}: {error_message(err)}", file=sys.stderr)


def _row(name: str, found: Compression) -> dict[str, Any]:
    return {
        "source": name,
        "texts": found.texts,
        "bytes": found.bytes,
        "tokens": found.tokens,
        "bytes_per_token": found.bytes / found.tokens,
        "one_byte_tokens": found.one_byte / found.tokens,
        "tokens_per_second": found.tokens / found.seconds,
    }


def _print_report(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from niels_gpt.system.console import short_number
    from niels_gpt.system.terminal import rich_console

    console = rich_console(highlight=False)
    console.print(f"[bold]{found['tokenizer']}[/]: {found['vocab_size']:,} ids, sha256 {found['sha256'][:12]}...")
    if found["lossy"] is not None:
        console.print(Text(f"it does not keep every text: {found['lossy']}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    for name in ("texts", "bytes", "tokens", "bytes/token", "one-byte tokens", "tokens/s"):
        table.add_column(name, justify="right", style="bold" if name == "bytes/token" else None)
    for row in found["sources"]:
        table.add_row(
            row["source"],
            f"{row['texts']:,}",
            short_number(row["bytes"]),
            short_number(row["tokens"]),
            f"{row['bytes_per_token']:.2f}",
            f"{row['one_byte_tokens']:.1%}",
            short_number(row["tokens_per_second"]),
        )
    table.add_row("[dim]GPT-2, English[/]", "", "", "", f"[dim]about {GPT2_BYTES_PER_TOKEN:.0f}[/]", "", "")
    table.add_row("[dim]bytes[/]", "", "", "", "[dim]1.00[/]", "[dim]100.0%[/]", "")
    console.print(table)
    console.print("\nlongest subwords: ", end="")
    console.print(Text("  ".join(repr(subword) for subword in found["longest_pieces"])), soft_wrap=True)
    such_as = ", such as " if found["unused_examples"] else ""
    console.print(f"unused: {found['unused_pieces']:,} subwords{such_as}", end="")
    console.print(Text("  ".join(repr(subword) for subword in found["unused_examples"])), soft_wrap=True)
