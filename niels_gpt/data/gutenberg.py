"""Books of Project Gutenberg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.reading.hub import HubRequest, Shuffle
from niels_gpt.data.reading.text_rows import iter_text_samples
from niels_gpt.data.types import PretrainSample

DATASET_ID = "nikolina-p/gutenberg_clean_en_splits"
"""Cleaned English books. `manu/project_gutenberg` has the raw books, with a split per language."""


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
    """Yield complete books, at most `take`. The shuffle buffer holds books: 10,000 of them need about 4 GB.

    `path` is a local file or folder with the same rows, or with a .txt file per book. Dropped rows are counted in
    `stats`. Raises DataUnavailable (a ValueError) if the rows cannot be read.
    """
    request = HubRequest(dataset_id, None, split, streaming, path, text_file_is_document=True)
    order = Shuffle(seed, shuffle_buffer_size) if shuffle else None
    return iter_text_samples(request, source="gutenberg", shuffle=order, take=take, stats=stats)
