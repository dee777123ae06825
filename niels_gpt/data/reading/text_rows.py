"""Samples from rows with a text: shared by fineweb-edu, gutenberg and wikitext."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from niels_gpt.data.reading.drops import Drops, text_problem
from niels_gpt.data.reading.hub import HubReader, HubRequest, Shuffle
from niels_gpt.data.types import PretrainSample

TEXTLESS_ROWS = 100
"""If this many first rows have no text, the rows are of another dataset."""


def select_text_field(sample: Mapping[str, Any]) -> str:
    """Return the text of a row: its `text`, or else its first string field. A null counts as absent.

    Raises ValueError with the keys of the row if there is no string field.
    """
    text: str = sample[text_key(sample)]
    return text


def text_key(sample: Mapping[str, Any]) -> str:
    """Return the key of the field that `select_text_field` uses. Raises ValueError if there is none."""
    if isinstance(sample.get("text"), str):
        return "text"
    for key, value in sample.items():
        if isinstance(value, str):
            return key
    raise ValueError(f"the row has no text: none of its fields is a string ({', '.join(map(str, sample))})")


def iter_text_samples(
    request: HubRequest,
    *,
    source: str,
    shuffle: Shuffle | None = None,
    take: int | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Yield the texts of a dataset, at most `take`; meta holds the other fields of the row.

    Dropped and counted in `stats`: rows that are blank, without text, or not utf-8. Raises ValueError if the first
    TEXTLESS_ROWS rows have no string field: the dataset is not what the caller expects. (Rows with a field `text` that
    is not a string are only dropped.)
    """
    check_take(take)
    yielded = 0
    reader = HubReader(request, shuffle=shuffle)
    textless: ValueError | None = None  # error for the first row, until a row has a text
    with Drops(source, stats) as drops:
        if take == 0:
            return
        for number, (_, row) in enumerate(reader):
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
            problem = text_problem(text)
            if problem:
                drops.add(problem)
                continue
            meta = row.copy()
            del meta[key]
            if reader.revision:
                meta["revision"] = reader.revision
            yield PretrainSample(text, source, meta)
            yielded += 1
            if yielded == take:
                return
        if textless:
            raise textless


def check_take(take: int | None, name: str = "take") -> None:
    """Raise ValueError unless `take` is None or an integer of at least 0."""
    if take is not None and (not isinstance(take, int) or take < 0):
        raise ValueError(f"{name} must be an integer of at least 0 or None, got {take!r}")
