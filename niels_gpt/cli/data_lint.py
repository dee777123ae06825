"""`niels-gpt data lint`: is the loss where it should be?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.meta import CacheError
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.tokenizer import Tokenizer


def run_lint(
    *, names: list[str], cache_dir: Path, T: int, split: str, example: int | None, seed: int | None, as_json: bool
) -> None:
    """Count supervised tokens per SFT cache and show one example; exit with 1 where a cache has none."""
    folder = CacheFolder(cache_dir)
    names = names or folder.names("sft")
    if not names:
        raise CacheError(f"no SFT cache in {folder.path}: build one with niels-gpt cache build primer")
    folder.check("sft", names, option="NAME")
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    shown: tuple[str, int, SFTExampleDataset] | None = None
    for name in names:
        try:
            dataset = folder.sft(name, split, T=T)
        except CacheError as err:
            refused.append(str(err))
            continue
        rows.append({"cache": name, **_counts(dataset)})
        if shown is None:
            shown = (name, _pick(dataset, example, seed), dataset)
    if as_json:
        print(json.dumps({"T": T, "split": split, "caches": rows, "refused": refused}, indent=2, ensure_ascii=False))
    else:
        _show(rows, T)
        if shown is not None:
            name, number, dataset = shown
            print(f"\n{name}, {split} example {number}; the loss is on what is marked:")
            console = Console(highlight=False)
            console.print(marked(dataset, number, folder.tokenizer, brackets=not console.is_terminal), soft_wrap=True)
    for problem in refused:
        print(f"error: {problem}", file=sys.stderr)
    if refused:
        sys.exit(1)


def _counts(dataset: SFTExampleDataset) -> dict[str, Any]:
    lengths = np.diff(dataset.bounds)
    seen = int(np.minimum(lengths, dataset.T + 1).sum())
    supervised = dataset.num_targets()
    return {
        "examples": dataset.num_examples,
        "without_targets": dataset.num_excluded,
        "cut": int((lengths > dataset.T + 1).sum()),
        "tokens": int(lengths.sum()),
        "seen": seen,
        "supervised": supervised,
        "share": supervised / seen,
    }


def _pick(dataset: SFTExampleDataset, example: int | None, seed: int | None) -> int:
    if example is not None:
        if not 0 <= example < dataset.num_examples:
            raise ValueError(f"--example must be in 0..{dataset.num_examples - 1}, got {example}")
        return example
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return dataset.plan(1, generator)[0]


def marked(dataset: SFTExampleDataset, number: int, tokenizer: Tokenizer, *, brackets: bool) -> Text:
    """An example as text, supervised tokens in green (and in brackets, for where there is no colour)."""
    tokens = dataset.example(number)[: dataset.T + 1].tolist()
    mask = dataset.mask(number)[: len(tokens)].tolist()
    text = Text()
    start = 0
    while start < len(tokens):  # runs of tokens that are alike, so that characters of several bytes stay whole
        end = start
        while end < len(tokens) and mask[end] == mask[start]:
            end += 1
        run = tokenizer.render(tokens[start:end])
        if mask[start]:
            text.append(f"[[{run}]]" if brackets else run, style="bold green")
        else:
            text.append(run, style="dim")
        start = end
    return text


def _show(rows: list[dict[str, Any]], T: int) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("cache")
    for name in ("examples", "without targets", f"cut at T={T}", "tokens", "supervised", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [f"{row[key]:,}" for key in ("examples", "without_targets", "cut", "seen", "supervised")]
        table.add_row(row["cache"], *numbers, f"{row['share']:.1%}")
    Console(highlight=False).print(table)
