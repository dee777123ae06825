"""Where a text comes from: its longest verbatim overlaps with the training text of a run, and what overlap is usual.

`open_provenance` opens the indexes of all sources of a run, and builds those that are missing. `find_overlaps` then
answers for any text; threads can call it at the same time. Overlap alone shows little, because any text shares phrases
with a large training text. So held-out passages are traced too, and a text recites if it overlaps more than they do.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.writing.encoding import normalize_line_ends
from niels_gpt.config import RunConfig
from niels_gpt.memorization.membership import open_source, run_history, source_names
from niels_gpt.memorization.progress import ProgressBar, no_progress
from niels_gpt.memorization.text_index import Passage, TextIndex, build_index, index_key, open_index
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files, user_cache
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.console import optional_write, plural
from niels_gpt.tokenizer import ByteTokenizer

MIN_LENGTH = 32
"""Characters from which on an overlap counts: shorter ones are common in text that was never trained on."""
SHORTEST = 24
"""Least `min_length`: shorter overlaps are not all found in a large text."""
MOST_BYTES = 1 << 16
"""Longest text to trace."""
USUAL = 0.95
"""A text recites if it overlaps more than this share of held-out passages of its length."""
COPY = 200
"""So many characters in a row, about 50 tokens, are a copy and no coincidence: held-out text too can contain one."""
_VERSION = "2"
"""Changes if `_profiles` measures something else."""


class Span(NamedTuple):
    """A part of the text that is verbatim in the training text, and cannot be extended there."""

    start: int
    end: int
    """Characters start .. end - 1 of the text."""
    occurrences: int
    """Where it was found; the passages are the first of them. Frequent passages have more than are found."""
    passages: list[Passage]


class Usual(NamedTuple):
    """The overlap of held-out passages of a source with all training text."""

    source: str
    passages: int
    """Number of passages, each as long as the text that they are compared with."""
    copies: int
    """Held-out passages that were left out, because they or COPY characters of them are in the training text."""
    share: float
    """Median of the share of covered characters."""
    high_share: float
    """The USUAL quantile of it."""
    longest: int
    """Median of the longest overlap."""
    high_longest: int


@dataclass(frozen=True)
class Overlaps:
    """What a text has in common with the training text."""

    text: str
    """The text as it was traced: with `\\n` line ends, if the run was trained on tokens."""
    min_length: int
    spans: list[Span]
    """The longest first; none is part of another."""
    lengths: np.ndarray
    """Per character: the length of the longest span that covers it; 0 if none does."""
    usual: list[Usual]
    """By source, for text of this length; empty if the run has no held-out text."""
    recites: bool | None
    """Whether COPY characters of it are a copy, or it overlaps more than held-out text of its length does.

    None: the text is too short."""
    problems: list[str]
    """Training text that could not be searched, or has changed since the training."""

    @property
    def share(self) -> float:
        """Share of the characters that are covered by spans."""
        return float((self.lengths > 0).mean()) if len(self.lengths) else 0.0

    @property
    def longest(self) -> int:
        """Length of the longest span."""
        return self.spans[0].end - self.spans[0].start if self.spans else 0

    def verdict(self) -> str:
        """One line that says whether the text recites, with the numbers."""
        n = self.min_length
        if self.recites is None:
            return f"too short to judge: {plural(len(self.text), 'character')}, and overlaps count from {n} on"
        if not self.spans:
            return f"does not recite: no {n} characters in a row are in the training text"
        facts = f"{self.share:.0%} of it is in overlaps of at least {n} characters, the longest has {self.longest:,}"
        usual = _of_source(self.usual, self.spans[0].passages[0].source)
        if usual is None:
            return f"recites: {facts}; there is no held-out text to compare with"
        compared = (
            f"of held-out passages of {usual.source} as long as it, 95 % have at most {usual.high_share:.0%} "
            f"and {usual.high_longest:,}"
        )
        return f"{'recites' if self.recites else 'overlaps no more than held-out text'}: {facts}; {compared}"

    def as_json(self) -> dict[str, Any]:
        """All of it as values of JSON."""
        spans = [
            {
                **span._asdict(),
                "length": span.end - span.start,
                "text": self.text[span.start : span.end],
                "passages": [passage._asdict() for passage in span.passages],
            }
            for span in self.spans
        ]
        return {
            "text": self.text,
            "characters": len(self.text),
            "min_length": self.min_length,
            "verdict": self.verdict(),
            "recites": self.recites,
            "share": self.share,
            "longest": self.longest,
            "spans": spans,
            "lengths": self.lengths.tolist(),
            "usual": [usual._asdict() for usual in self.usual],
            "problems": self.problems,
        }


def _of_source(usual: Sequence[Usual], source: str) -> Usual | None:
    """What is usual in a source; in the first one if that has no held-out text."""
    return next((each for each in usual if each.source == source), usual[0] if usual else None)


class Profile(NamedTuple):
    """The overlaps of the held-out passages of a source with all training text."""

    source: str
    lengths: np.ndarray
    """The length of the longest overlap that starts at each character of the passages."""
    copies: int
    """Passages that were left out; see Usual."""


@dataclass(frozen=True)
class Provenance:
    """The open indexes of a run."""

    indexes: list[TextIndex]
    profiles: list[Profile]
    normalize: bool
    """Whether the training text has `\\n` line ends only."""
    problems: list[str]


# --- opening -----------------------------------------------------------------------------------------


def open_provenance(loaded: LoadedRun, progress: ProgressBar = no_progress) -> Provenance:
    """Open the training text of a run and of the runs that its weights came from; build indexes that are missing.

    Raises ValueError if none of its training text is known or available, OSError if an index cannot be written.
    """
    indexes: dict[str, TextIndex] = {}
    problems: list[str] = []
    for config, data in run_history(loaded, problems):
        if not data:
            problems.append(f"{loaded.path} does not record what it was trained on")
            continue
        for name in source_names(config):
            index = _open_or_build(config, data, name, problems, progress)
            if index is not None:
                indexes.setdefault(index.key, index)
    if not indexes:
        raise ValueError(f"there is no training text to search: {'; '.join(dict.fromkeys(problems))}")
    found = list(indexes.values())
    normalize = not isinstance(loaded.tokenizer, ByteTokenizer)
    return Provenance(found, _profiles(found, progress), normalize, list(dict.fromkeys(problems)))


def _open_or_build(
    config: RunConfig, data: Mapping[str, str], name: str | None, problems: list[str], progress: ProgressBar
) -> TextIndex | None:
    """The index of what the run was trained on, else of the source as it is now."""
    if name is None:  # a splice run: the hashes are of its source and of the chosen documents
        trained = {key: sha for key, sha in data.items() if key != "tokenizer"}
        source = next((key for key in trained if key != "documents"), "")
    else:
        trained = {name: data[name]} if name in data else {}
        source = name
    index = open_index(index_key(source, trained, data.get("tokenizer"))) if trained else None
    if index is not None:
        return index
    opened = open_source(config, data, name, problems)
    if opened is None:
        return None
    index = open_index(index_key(opened.name, opened.fingerprint, opened.tokenizer.sha256))
    return index or build_index(opened, progress)


def _profiles(indexes: list[TextIndex], progress: ProgressBar) -> list[Profile]:
    """Overlaps of the held-out passages of all sources; measured once for a set of indexes, and kept beside them."""
    key = files.sha256_bytes("".join([_VERSION, *sorted(index.key for index in indexes)]).encode("ascii"))[:16]
    path = indexes[0].folder / f"usual-{key}.json"
    try:
        kept = read_checked_json(path)["profiles"]
        return [Profile(name, np.array(lengths, dtype=np.int64), copies) for name, lengths, copies in kept]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    lengths: dict[str, list[int]] = {}
    copies: Counter[str] = Counter()
    passages = [(index.source, passage) for index in indexes for passage in index.held_out]
    with progress("measuring the overlap of held-out text") as report:
        for done, (source, passage) in enumerate(passages, 1):
            starting = _longest_from(_matches(indexes, passage, SHORTEST), len(passage))
            if starting.max() < min(COPY, len(passage)):  # replies of held-out dialogues can be copies as a whole
                lengths.setdefault(source, []).extend(starting.tolist())
            else:
                copies[source] += 1
            report(done, len(passages))
    with optional_write(path):
        write_checked_json(path, {"profiles": [(name, each, copies[name]) for name, each in lengths.items()]})
        user_cache.mark_used(path.parent)
    return [Profile(name, np.array(each, dtype=np.int64), copies[name]) for name, each in lengths.items()]


# --- searching ---------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """A maximal match, in characters of the text."""

    start: int
    end: int
    number: int
    """Of the index."""
    position: int
    """Of the first whole character in the text of the index, in bytes."""
    size: int
    """In bytes."""


def find_overlaps(
    provenance: Provenance, text: str, *, min_length: int = MIN_LENGTH, passages: int = 3, context: int = 80
) -> Overlaps:
    """Return what a text has in common with the training text, in overlaps of at least `min_length` characters.

    passages: most passages per span. context: characters before and after a passage.
    Raises ValueError for an empty text, one of more than MOST_BYTES, and a min_length below SHORTEST.
    """
    if min_length < SHORTEST:
        raise ValueError(f"min_length must be at least {SHORTEST}, got {min_length}")
    text = normalize_line_ends(text) if provenance.normalize else text
    if not text:
        raise ValueError("the text is empty: give at least one character to trace")
    matches = _matches(provenance.indexes, text, min_length)
    lengths = np.zeros(len(text), dtype=np.int64)
    spans = []
    by_span: dict[tuple[int, int], list[_Match]] = {}
    for match in matches:
        by_span.setdefault((match.start, match.end), []).append(match)
    reach = _reach(matches, len(text))
    for (start, end), found in sorted(by_span.items(), key=lambda item: (item[0][1] - item[0][0], -item[0][0])):
        if (start and reach[start - 1] >= end) or reach[start] > end:
            continue  # part of a longer one
        lengths[start:end] = end - start
        shown = [provenance.indexes[m.number].passage(m.position, m.size, context) for m in found[:passages]]
        spans.append(Span(start, end, len(found), shown))
    spans.reverse()
    result = Overlaps(
        text=text,
        min_length=min_length,
        spans=spans,
        lengths=lengths,
        usual=[_usual(profile, len(text), min_length) for profile in provenance.profiles],
        recites=None,
        problems=provenance.problems,
    )
    return dataclasses.replace(result, recites=_recites(result))


def _recites(overlaps: Overlaps) -> bool | None:
    if len(overlaps.text) < overlaps.min_length:
        return None
    if not overlaps.spans:
        return False
    if overlaps.longest >= COPY:
        return True
    usual = _of_source(overlaps.usual, overlaps.spans[0].passages[0].source)
    return usual is None or overlaps.longest > usual.high_longest or overlaps.share > usual.high_share


def _matches(indexes: Sequence[TextIndex], text: str, min_length: int) -> list[_Match]:
    """The maximal matches of at least `min_length` characters in all indexes, in the order of the indexes."""
    try:
        query = text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ValueError(f"the text is not valid unicode (character {err.start})") from None
    if len(query) > MOST_BYTES:
        raise ValueError(f"the text has {len(query):,} bytes, more than {MOST_BYTES:,}: trace a part of it")
    # Characters begin at all bytes but 0b10xxxxxx; a match counts from its first whole character to its last one.
    begins = np.append(np.flatnonzero(np.frombuffer(query, dtype=np.uint8) & 0xC0 != 0x80), len(query))
    found = []
    for number, index in enumerate(indexes):
        start, end, position = index.search.find(query, min_length)
        first = np.searchsorted(begins, start, side="left")
        last = np.searchsorted(begins, end, side="right") - 1
        columns = (first, last, position + begins[first] - start, begins[last] - begins[first])
        for match in np.stack(columns, axis=1)[last - first >= min_length].tolist():
            found.append(_Match(match[0], match[1], number, match[2], match[3]))
    return found


def _reach(matches: Sequence[_Match], characters: int) -> np.ndarray:
    """For each character, the end of the match that covers it or begins there, and reaches furthest; 0 if none does."""
    reach = np.zeros(characters, dtype=np.int64)
    if matches:
        np.maximum.at(reach, [match.start for match in matches], [match.end for match in matches])
    return np.maximum.accumulate(reach)


def _longest_from(matches: Sequence[_Match], characters: int) -> np.ndarray:
    """The length of the longest match that starts at each character, as part of a maximal one."""
    return np.maximum(_reach(matches, characters) - np.arange(characters), 0)


def _usual(profile: Profile, characters: int, min_length: int) -> Usual:
    """What is usual for text of a length: held-out text, cut into pieces of this length, as far as it reaches."""
    width = min(characters, len(profile.lengths))
    pieces = profile.lengths[: len(profile.lengths) // width * width].reshape(-1, width)
    offsets = np.arange(width)
    lengths = np.minimum(pieces, width - offsets)  # a match ends with its piece
    ends = np.where(lengths >= min_length, lengths + offsets, 0)
    shares = (np.maximum.accumulate(ends, axis=1) > offsets).mean(axis=1)
    longest = np.where(lengths >= min_length, lengths, 0).max(axis=1)
    return Usual(
        source=profile.source,
        passages=len(pieces),
        copies=profile.copies,
        share=float(np.median(shares)),
        high_share=float(np.quantile(shares, USUAL, method="higher")),
        longest=int(np.quantile(longest, 0.5, method="lower")),
        high_longest=int(np.quantile(longest, USUAL, method="higher")),
    )
