"""Rows that hold a text, as samples: what fineweb-edu, gutenberg and wikitext share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from niels_gpt.data.drops import Drops, is_text
from niels_gpt.data.hub import Reader, Request, Shuffle
from niels_gpt.data.types import PretrainSample


def select_text_field(sample: Mapping[str, Any]) -> str:
    """The text of a row: its `text`, else its first string field. A null counts as absent.

    Raises ValueError that shows the keys where there is none.
    """
    text = sample.get("text")
    if isinstance(text, str):
        return text
    for value in sample.values():
        if isinstance(value, str):
            return value
    raise ValueError(f"no text in this row: none of its fields is a string ({', '.join(map(str, sample))})")


def documents(
    request: Request,
    *,
    source: str,
    shuffle: Shuffle | None = None,
    take: int | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """The texts of a dataset, at most `take`; meta holds the other fields of the row.

    Left out and counted: rows that are empty or only white space, that have no text, or one that is no utf-8.
    Raises ValueError if already the first row has no text at all: these are other rows than was thought.
    """
    check_take(take)
    given = 0
    reader = Reader(request, shuffle=shuffle)
    with Drops(source, stats) as drops:
        if take == 0:
            return
        for number, (_, row) in enumerate(reader):
            text = row.get("text")
            if not isinstance(text, str):
                try:
                    text = select_text_field(row)
                except ValueError:
                    if number == 0:
                        raise
                    drops.add("without text")
                    continue
            if not text or text.isspace():
                drops.add("empty")
                continue
            if not is_text(text):
                drops.add("not utf-8")
                continue
            meta = dict(row)
            meta.pop("text", None)
            if reader.revision:
                meta["revision"] = reader.revision
            yield PretrainSample(text, source, meta)
            given += 1
            if given == take:
                return


def check_take(take: int | None, name: str = "take") -> None:
    """Raise ValueError for a number of samples that is none."""
    if take is not None and take < 0:
        raise ValueError(f"{name} must be at least 0, got {take}")
