"""Books of Project Gutenberg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.reading.hub import HubRequest, Shuffle
from niels_gpt.data.reading.text_rows import iter_text_samples
from niels_gpt.data.types import PretrainSample

DATASET_ID = "nikolina-p/gutenberg_clean_en_splits"
"""English books, cleaned. `manu/project_gutenberg` has the raw ones, with a split per language."""


def iter_gutenberg(
    *,
    dataset_id: str = DATASET_ID,
    split: str = "train",
    streaming: bool = True,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    take: int | None = None,
    path: str | Path | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Whole books, at most `take`. The shuffle buffer holds books: 10,000 of them are some 4 GB.

    `path` is a local file or folder with the same rows, or with a .txt file per book.
    Raises DataUnavailable (a ValueError) where the rows cannot be had.
    """
    request = HubRequest(dataset_id, None, split, streaming, path, text_file_is_document=True)
    order = Shuffle(seed, shuffle_buffer_size) if shuffle else None
    return iter_text_samples(request, source="gutenberg", shuffle=order, take=take, stats=stats)
