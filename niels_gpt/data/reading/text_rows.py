"""Rows that hold a text, as samples: what fineweb-edu, gutenberg and wikitext share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from niels_gpt.data.reading.drops import Drops, is_text
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.types import PretrainSample

TEXTLESS_ROWS = 100
"""So many rows without any text, from the first on, are not bad luck but another dataset."""


def select_text_field(sample: Mapping[str, Any]) -> str:
    """The text of a row: its `text`, else its first string field. A null counts as absent.

    Raises ValueError that shows the keys where there is none.
    """
    text: str = sample[text_key(sample)]
    return text


def text_key(sample: Mapping[str, Any]) -> str:
    """The key of the field that `select_text_field` takes."""
    if isinstance(sample.get("text"), str):
        return "text"
    for key, value in sample.items():
        if isinstance(value, str):
            return key
    raise ValueError(f"no text in this row: none of its fields is a string ({', '.join(map(str, sample))})")


def iter_text_samples(
    request: HubRequest,
    *,
    source: str,
    shuffle: Shuffle | None = None,
    take: int | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """The texts of a dataset, at most `take`; meta holds the other fields of the row.

    Left out and counted: rows that are empty or only white space, that have no text, or one that is no utf-8.
    Raises ValueError if none of the first rows has any string field: these are other rows than was thought. (Where
    there is a field `text` that holds something else, the rows are left out and counted.)
    """
    check_take(take)
    given = 0
    reader = HubReader(request, shuffle=shuffle)
    textless: ValueError | None = None  # of the first row, while no row has had a text
    with Drops(source, stats) as drops:
        if take == 0:
            return
        for number, (_, row) in enumerate(reader):
            key = "text"
            if not isinstance(row.get(key), str):
                try:
                    key = text_key(row)
                except ValueError as err:
                    if number == 0 and row and "text" not in row:
                        textless = err
                    if textless and number + 1 >= TEXTLESS_ROWS:
                        raise textless from None
                    drops.add("without text")
                    continue
            textless = None
            text: str = row[key]
            if not text or text.isspace():
                drops.add("empty")
                continue
            if not is_text(text):
                drops.add("not utf-8")
                continue
            meta = row.copy()
            del meta[key]
            if reader.revision:
                meta["revision"] = reader.revision
            yield PretrainSample(text, source, meta)
            given += 1
            if given == take:
                return
        if textless:
            raise textless


def check_take(take: int | None, name: str = "take") -> None:
    """Raise ValueError for a number of samples that is none."""
    if take is not None and (not isinstance(take, int) or take < 0):
        raise ValueError(f"{name} must be a whole number of at least 0, or None, got {take!r}")
