"""Wikitext, from the Hugging Face Hub or from local files with the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.documents import documents
from niels_gpt.data.hub import Request, open_dataset
from niels_gpt.data.local import DataUnavailable, find_local
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
    request = Request(DATASET_ID, config, SPLITS.get(split, split), path=path)
    return documents(request, source="wikitext", take=take, stats=stats)


def load_wikitext(
    *, path: str | Path | None = None, dataset_id: str = DATASET_ID, config: str = CONFIG
) -> dict[str, list[str]]:
    """{"train", "val", "test"}: the texts of each split; rows that are empty or white space are dropped.

    `path` is a folder with train, validation (and test) files instead of the Hub.
    Raises DataUnavailable (a ValueError) that says what to do where neither can be had.
    """
    splits = open_dataset(Request(dataset_id, config, split=None, path=path))
    missing = [hub for hub in ("train", "validation") if hub not in splits]
    if missing:
        where = find_local(dataset_id, path) or dataset_id
        raise DataUnavailable(
            f"{where} has no {' and no '.join(missing)} split; expected e.g. train.parquet and validation.parquet "
            "(also .jsonl, .jsonl.gz, .txt)"
        )
    return {
        ours: [text for text in splits[hub]["text"] if text and not text.isspace()] if hub in splits else []
        for ours, hub in SPLITS.items()
    }
