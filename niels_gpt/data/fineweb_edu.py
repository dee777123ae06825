"""fineweb-edu: educational web pages, streamed from the Hub (1.3 trillion tokens)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.reading.hub import HubRequest, Shuffle
from niels_gpt.data.reading.text_rows import iter_text_samples, select_text_field
from niels_gpt.data.types import PretrainSample

__all__ = ["DATASET_ID", "iter_fineweb_edu", "select_text_field"]

DATASET_ID = "HuggingFaceFW/fineweb-edu"


def iter_fineweb_edu(
    *,
    name: str = "CC-MAIN-2024-10",
    split: str = "train",
    streaming: bool = True,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    take: int | None = None,
    path: str | Path | None = None,
    dataset_id: str | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Yield web pages, at most `take`; reads no more rows than that and the shuffle buffer.

    `path` is a local file or folder with the same rows. Dropped rows are counted in `stats`.
    Raises DataUnavailable (a ValueError) if the rows cannot be read.
    """
    request = HubRequest(dataset_id or DATASET_ID, name, split, streaming, path, text_file_is_document=True)
    order = Shuffle(seed, shuffle_buffer_size) if shuffle else None
    return iter_text_samples(request, source="fineweb_edu", shuffle=order, take=take, stats=stats)
