"""The note and line that a passage comes from, also if the model learned it from a conversation about the note."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from niels_gpt.memorization.measure import Document
from niels_gpt.tokenizer import AnyTokenizer, text_bytes

WORDS = 3
"""Words in a row that a passage and a note have in common: an answer about a note drops its marks."""
MIN_SHARE = 0.4
"""Share of such words of a passage that its note has."""
_WORD = re.compile(r"\w+")


def with_origins(
    passages: list[dict[str, Any]], documents: Sequence[Document], tokenizer: AnyTokenizer
) -> list[dict[str, Any]]:
    """Return the passages of some documents with `note` and `line`: those of the file of a note, where it is known.

    A passage of another document is searched in the notes: word for word, else by the most words in a row.
    """
    if not passages:
        return passages
    by_name = {document.name: document for document in documents}
    notes = {one.note: text_bytes(tokenizer, one.ids).decode("utf-8", "replace") for one in documents if one.note}
    wanted = {run for passage in passages for run, _ in _runs(passage["suffix"])}
    places: dict[tuple[str, ...], dict[str, int]] = {}
    for note, content in notes.items():
        for run, offset in _runs(content):
            if run in wanted:
                places.setdefault(run, {}).setdefault(note, offset)
    for passage in passages:
        own, suffix = by_name.get(passage["document"]), passage["suffix"]
        if own is not None and own.note:
            before = text_bytes(tokenizer, own.ids[: passage["cut"]]).count(b"\n")
            line = before + suffix[: len(suffix) - len(suffix.lstrip())].count("\n") + 1
            passage |= {"note": own.note, "line": line}
        elif (found := _find(suffix.strip(), notes, places)) is not None:
            note, offset = found
            passage |= {"note": note, "line": notes[note].count("\n", 0, offset) + 1}
    return passages


def _find(
    text: str, notes: Mapping[str, str], places: Mapping[tuple[str, ...], Mapping[str, int]]
) -> tuple[str, int] | None:
    """(note, offset) of the first note with a text, or of the note with most of its words in a row."""
    if not text:
        return None
    for note, content in notes.items():
        if text in content:
            return note, content.index(text)
    runs = [run for run, _ in _runs(text)]
    [(note, number)] = Counter(note for run in runs for note in places.get(run, ())).most_common(1) or [("", 0)]
    if number < max(MIN_SHARE * len(runs), 1):
        return None
    return note, next(places[run][note] for run in runs if note in places.get(run, ()))


def _runs(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (words in a row, offset of the first) in lower case."""
    words = [(match[0].lower(), match.start()) for match in _WORD.finditer(text)]
    for i in range(len(words) - WORDS + 1):
        yield tuple(word for word, _ in words[i : i + WORDS]), words[i][1]
