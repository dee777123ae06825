"""databricks-dolly-15k: instructions and responses written by people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.drops import Drops, is_text
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.types import ChatMessage, ChatSample

DATASET_ID = "databricks/databricks-dolly-15k"
SYSTEM = "you are a helpful assistant."


def iter_dolly_sft(
    *,
    split: str = "train",
    seed: int = 42,
    shuffle: bool = True,
    take: int | None = None,
    include_system: bool = False,
    path: str | Path | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[ChatSample]:
    """Yield one chat per row, at most `take`. meta: `row` (its number in the dataset), `category` and `id` if present.

    Rows without instruction or response are dropped and counted in `stats`.
    Raises DataUnavailable (a ValueError) if the rows cannot be read.
    """
    check_take(take)
    yielded = 0
    reader = HubReader(HubRequest(DATASET_ID, None, split, path=path), shuffle=Shuffle(seed) if shuffle else None)
    with Drops("dolly15k", stats) as drops:
        if take == 0:
            return
        for number, row in reader:
            problem = _problem(row)
            if problem:
                drops.add(problem)
                continue
            meta: dict[str, Any] = {key: row[key] for key in ("category", "id") if row.get(key) is not None}
            meta["row"] = number
            if reader.revision:
                meta["revision"] = reader.revision
            yield ChatSample(dolly_messages(row, include_system=include_system), "dolly15k", meta)
            yielded += 1
            if yielded == take:
                return


def dolly_messages(row: Mapping[str, Any], *, include_system: bool = False) -> list[ChatMessage]:
    """Return the messages of a row. An empty or blank context is ignored."""
    context = row.get("context")
    question = row["instruction"]
    if isinstance(context, str) and context.strip():
        question += f"\n\ncontext:\n{context}"
    system = [ChatMessage("system", SYSTEM)] if include_system else []
    return [*system, ChatMessage("user", question), ChatMessage("assistant", row["response"])]


def _problem(row: Mapping[str, Any]) -> str | None:
    """Return the reason to drop a row, or None."""
    for key in ("instruction", "response", "context"):
        value = row.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            if key != "context":
                return f"without {key}"
        elif not isinstance(value, str):
            return f"whose {key} is no text"
        elif not is_text(value):
            return f"whose {key} is not utf-8"
    return None
