"""`niels-gpt tokenizer train` and `report`."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from niels_gpt.cache.sources.build import choose_sources, train_on
from niels_gpt.cache.sources.texts import BuildSettings, training_texts
from niels_gpt.data.registry import Source
from niels_gpt.system.console import error_message, format_duration, short_number
from niels_gpt.tokenizer import Tokenizer, find_special, load_tokenizer

UNKNOWN = 0
"""The id of `<unk>`, which is never encoded."""
GPT2 = 4.0
"""Bytes per token that GPT-2's tokenizer of 50,257 pieces is usually said to reach on English text."""


def run_train(
    *,
    names: list[str],
    out: Path,
    vocab_size: int,
    seed: int,
    documents: int,
    path: Path | None,
    config: Path | None,
    force: bool,
) -> None:
    if (out / "spm.model").exists() and not force:
        raise ValueError(
            f"{out} has a tokenizer already, and caches may depend on it: choose another --out, or --force"
        )
    chosen = choose_sources(names or None, [], [], config)
    settings = BuildSettings(
        cache_dir=out.parent, seed=seed, vocab_size=vocab_size, path=path, tokenizer_documents=documents
    )
    console = Console(highlight=False)
    began = time.monotonic()
    unread: list[str] = []

    def unreachable(source: Source, err: Exception) -> None:
        if names:  # it was asked for
            raise err
        unread.append(source.name)
        print(f"warning: {source.name} is left out: {error_message(err)}", file=sys.stderr)

    with console.status(f"training a tokenizer of {vocab_size:,} pieces"):
        made = train_on(chosen, settings, unreachable, out=out)
    took = format_duration(time.monotonic() - began)
    print(f"{out / 'spm.model'}: {made.vocab_size:,} ids, sha256 {made.sha256[:12]}..., in {took}")
    read = " ".join(source.name for source in chosen if source.name not in unread)
    options = {"--tokenizer": out, "--path": path, "--config": config}
    given = " ".join(f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None)
    print(f"next: niels-gpt tokenizer report {read} {given}")


def run_report(
    *,
    names: list[str],
    tokenizer: Path,
    take: int,
    path: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Bytes per token of each source; the longest pieces; pieces that none of the text uses."""
    made = load_tokenizer(tokenizer)
    chosen = choose_sources(names or None, [], [], config)
    rows: list[dict[str, Any]] = []
    used = np.zeros(made.vocab_size, dtype=np.int64)
    for source in chosen:
        try:
            row, counts = _measure(made, source, take=take, path=path)
        except (OSError, ValueError) as err:
            if names:
                raise
            print(f"warning: {source.name} is left out: {error_message(err)}", file=sys.stderr)
            continue
        rows.append(row)
        used += counts
    if not rows:
        raise ValueError("no source could be read: name one that is here (niels-gpt data list)")
    pieces = made.token_bytes
    special = set(made.special_token_ids().values())
    plain = [i for i in range(made.vocab_size) if len(pieces[i]) > 1 and i not in special and i != UNKNOWN]
    longest = sorted(plain, key=lambda i: (-len(pieces[i]), i))[:12]
    unused = [i for i in plain if not used[i]]
    report = {
        "tokenizer": str(tokenizer),
        "sha256": made.sha256,
        "vocab_size": made.vocab_size,
        "sources": rows,
        "longest_pieces": [made.decode([i]) for i in longest],
        "unused_pieces": len(unused),
        "unused_examples": [made.decode([i]) for i in unused[:24]],
    }
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _show(report)


def _measure(made: Tokenizer, source: Source, *, take: int, path: Path | None) -> tuple[dict[str, Any], np.ndarray]:
    """(numbers of a source, how often each piece occurs in it)."""
    settings = BuildSettings(cache_dir=Path(), path=path)
    texts = [text for text in itertools.islice(training_texts(source, settings), take) if find_special(text) is None]
    if not texts:
        raise ValueError(f"{source.name} has no text")
    began = time.perf_counter()
    ids = np.concatenate(made.encode_batch(texts))
    seconds = time.perf_counter() - began
    counts = np.bincount(ids, minlength=made.vocab_size)
    size = sum(len(text.encode("utf-8")) for text in texts)
    single = sum(int(counts[i]) for i, piece in enumerate(made.token_bytes) if len(piece) == 1)
    row = {
        "source": source.name,
        "texts": len(texts),
        "bytes": size,
        "tokens": len(ids),
        "bytes_per_token": size / len(ids),
        "one_byte_tokens": single / len(ids),
        "tokens_per_second": len(ids) / seconds,
    }
    return row, counts


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{report['tokenizer']}[/]: {report['vocab_size']:,} ids, sha256 {report['sha256'][:12]}...")
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    for name in ("texts", "bytes", "tokens", "bytes/token", "one-byte tokens", "tokens/s"):
        table.add_column(name, justify="right", style="bold" if name == "bytes/token" else None)
    for row in report["sources"]:
        table.add_row(
            row["source"],
            f"{row['texts']:,}",
            short_number(row["bytes"]),
            short_number(row["tokens"]),
            f"{row['bytes_per_token']:.2f}",
            f"{row['one_byte_tokens']:.1%}",
            short_number(row["tokens_per_second"]),
        )
    table.add_row("[dim]GPT-2, English[/]", "", "", "", f"[dim]about {GPT2:.0f}[/]", "", "")
    table.add_row("[dim]bytes[/]", "", "", "", "[dim]1.00[/]", "[dim]100.0%[/]", "")
    console.print(table)
    console.print("\nlongest pieces: ", end="")
    console.print(Text("  ".join(repr(piece) for piece in report["longest_pieces"])), soft_wrap=True)
    such_as = ", such as " if report["unused_examples"] else ""
    console.print(f"unused here: {report['unused_pieces']:,} pieces{such_as}", end="")
    console.print(Text("  ".join(repr(piece) for piece in report["unused_examples"])), soft_wrap=True)
