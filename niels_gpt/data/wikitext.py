"""Wikitext, from the Hugging Face Hub or from local files with the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.drops import Drops, text_problem
from niels_gpt.data.reading.hub import HubRequest, open_dataset
from niels_gpt.data.reading.local import DataUnavailable, find_files, find_local
from niels_gpt.data.reading.text_rows import iter_text_samples
from niels_gpt.data.types import PretrainSample

DATASET_ID = "wikitext"
CONFIG = "wikitext-103-raw-v1"
SPLITS = {"train": "train", "val": "validation", "test": "test"}
"""Our name of each split -> the name on the Hub."""


def iter_wikitext(
    *,
    config: str = CONFIG,
    split: str = "train",
    take: int | None = None,
    path: str | Path | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Yield the lines of a split ("val" is "validation"), at most `take`; empty lines are dropped and counted.

    Raises DataUnavailable (a ValueError) if the rows cannot be read.
    """
    request = HubRequest(DATASET_ID, config, SPLITS.get(split, split), path=path)
    return iter_text_samples(request, source="wikitext", take=take, stats=stats)


def load_wikitext(
    *,
    path: str | Path | None = None,
    dataset_id: str = DATASET_ID,
    config: str = CONFIG,
    stats: dict[str, int] | None = None,
) -> dict[str, list[str]]:
    """Return the texts of each split: {"train", "val", "test"}.

    `path` is a folder with train, validation (and test) files instead of the Hub. Rows that are blank, without text, or
    not utf-8 are dropped and counted in `stats`, over all splits.
    Raises DataUnavailable (a ValueError) with a remedy if the rows cannot be read, ValueError for rows without a column
    `text`.
    """
    splits = open_dataset(HubRequest(dataset_id, config, split=None, path=path))
    local = find_local(dataset_id, path)
    missing = [hub for hub in ("train", "validation") if hub not in splits]
    if missing:
        raise DataUnavailable(
            f"{local or dataset_id} has no {' and no '.join(missing)} split; expected e.g. train.parquet and "
            "validation.parquet (also .jsonl, .jsonl.gz, .txt)"
        )
    for hub in SPLITS.values():
        columns = getattr(splits.get(hub), "column_names", None)
        if columns is not None and "text" not in columns:
            where = dataset_id if local is None else ", ".join(find_files(local, config)[hub])
            raise ValueError(
                f"{where}: the rows of {hub} have no column text; they have {', '.join(columns)}: "
                "rename the column with the text"
            )
    with Drops("wikitext", stats) as drops:
        return {ours: list(_texts(splits[hub]["text"], drops)) if hub in splits else [] for ours, hub in SPLITS.items()}


def _texts(column: Iterable[Any], drops: Drops) -> Iterator[str]:
    """Yield the valid texts of a column, by the rules of `iter_text_samples`."""
    for text in column:
        problem = text_problem(text)
        if problem:
            drops.add(problem)
        else:
            yield text
