"""Wikitext, from the Hugging Face Hub or from local files with the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.drops import Drops, is_text
from niels_gpt.data.reading.hub import HubRequest, open_dataset
from niels_gpt.data.reading.local import DataUnavailable, find_files, find_local
from niels_gpt.data.reading.text_rows import iter_text_samples
from niels_gpt.data.types import PretrainSample

DATASET_ID = "wikitext"
CONFIG = "wikitext-103-raw-v1"
SPLITS = {"train": "train", "val": "validation", "test": "test"}
"""Our names and the Hub's."""


def iter_wikitext(
    *,
    config: str = CONFIG,
    split: str = "train",
    take: int | None = None,
    path: str | Path | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """The lines of a split ("val" is "validation"), at most `take`; empty ones are left out and counted.

    Raises DataUnavailable (a ValueError) where the rows cannot be had.
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
    """{"train", "val", "test"}: the texts of each split.

    `path` is a folder with train, validation (and test) files instead of the Hub. Rows that are empty or white space,
    without text, or not utf-8 are left out and counted in `stats`, over all splits.
    Raises DataUnavailable (a ValueError) that says what to do where neither can be had, ValueError for rows without a
    column `text`.
    """
    splits = open_dataset(HubRequest(dataset_id, config, split=None, path=path))
    place = find_local(dataset_id, path)
    missing = [hub for hub in ("train", "validation") if hub not in splits]
    if missing:
        raise DataUnavailable(
            f"{place or dataset_id} has no {' and no '.join(missing)} split; expected e.g. train.parquet and "
            "validation.parquet (also .jsonl, .jsonl.gz, .txt)"
        )
    for hub in SPLITS.values():
        columns = getattr(splits.get(hub), "column_names", None)
        if columns is not None and "text" not in columns:
            where = dataset_id if place is None else ", ".join(find_files(place, config)[hub])
            raise ValueError(
                f"{where}: the rows of {hub} have no column text; they have {', '.join(columns)}: "
                "give the one that holds the text this name"
            )
    with Drops("wikitext", stats) as drops:
        return {ours: list(_texts(splits[hub]["text"], drops)) if hub in splits else [] for ours, hub in SPLITS.items()}


def _texts(column: Iterable[Any], drops: Drops) -> Iterator[str]:
    """What is text of a column, as `iter_text_samples` takes it from rows."""
    for text in column:
        if not isinstance(text, str):
            drops.add("without text")
        elif not text or text.isspace():
            drops.add("empty")
        elif not is_text(text):
            drops.add("not utf-8")
        else:
            yield text
