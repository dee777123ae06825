"""How often each token is seen and supervised in an epoch or in some steps, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from niels_gpt.splice.base import SpliceDataset
from niels_gpt.splice.frames import Spans
from niels_gpt.splice.packing import arrange

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Coverage:
    """Counts for each token of a document."""

    name: str
    length: int
    seen: np.ndarray
    """(length,) how often each token was in a frame."""
    supervised: np.ndarray
    """(length,) how often it was a prediction target."""


def epoch_spans(dataset: SpliceDataset, epoch: int = 0) -> Iterable[Spans]:
    """The spans of all examples of an epoch, in chunks; their order does not matter for counts."""
    for i in range(0, len(dataset), _CHUNK):
        yield dataset.spans(np.arange(i, min(i + _CHUNK, len(dataset))), epoch)


def step_spans(dataset: SpliceDataset, seed: int, steps: int, B: int) -> Iterable[Spans]:
    """The spans of the first `steps` steps of a run, one step at a time."""
    for step in range(steps):
        yield dataset.planned(dataset.plan(seed, step, B))


def cover(dataset: SpliceDataset, names: Sequence[str], spans: Iterable[Spans]) -> list[Coverage]:
    """How often the spans cover each token of each document.

    Every span adds 1 at its first token and subtracts 1 after its last; the running sum is the count. A span that wraps
    around the end of its document (cyclic_roll) counts as two.
    """
    ends = np.cumsum(dataset.lengths + 1)  # one slot more than tokens, for spans that end with the document
    begins = ends - dataset.lengths - 1
    seen, supervised = (np.zeros(int(ends[-1]), dtype=np.int64) for _ in range(2))
    for part in spans:
        length = dataset.lengths[part.doc]
        for counts, first in ((seen, 0), (supervised, 1)):  # the first token of a span is not predicted
            _add(counts, begins[part.doc], length, part.t + first, part.length - first)
    for counts in (seen, supervised):
        np.cumsum(counts, out=counts)
    return [
        Coverage(name, int(end - begin - 1), seen[begin : end - 1], supervised[begin : end - 1])
        for name, begin, end in zip(names, begins.tolist(), ends.tolist(), strict=True)
    ]


def _add(counts: np.ndarray, begin: np.ndarray, size: np.ndarray, t: np.ndarray, length: np.ndarray) -> None:
    """Add spans of `length` tokens from t on; their documents begin at `begin` and have `size` tokens."""
    t = t % size
    inside = np.minimum(length, size - t)
    np.add.at(counts, begin + t, 1)
    np.add.at(counts, begin + t + inside, -1)
    wrapped = np.flatnonzero(length > inside)
    np.add.at(counts, begin[wrapped], 1)
    np.add.at(counts, begin[wrapped] + (length - inside)[wrapped], -1)


def frames_needed(lengths: Iterable[np.ndarray], S: int, B: int, *, packed: bool) -> tuple[int, int]:
    """(number of examples, number of frames) for spans of these lengths, B examples at a time."""
    lengths = np.concatenate([np.empty(0, dtype=np.int32), *lengths])
    if not packed:
        return len(lengths), len(lengths)
    frames = (int(arrange(lengths[i : i + B], S)[0].max()) + 1 for i in range(0, len(lengths), B))
    return len(lengths), sum(frames)


def passes(dataset: SpliceDataset, seed: int, steps: int, B: int) -> np.ndarray:
    """(steps + 1,) how many times, on average, each token of the documents was predicted after each step."""
    counts = dataset.layouts.counts()
    total = int((dataset.lengths[counts > 0] - 1).sum())
    each = [int((part.length - 1).sum()) for part in step_spans(dataset, seed, steps, B)]
    return np.concatenate(([0.0], np.cumsum(each) / max(total, 1)))
