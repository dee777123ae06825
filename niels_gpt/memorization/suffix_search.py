"""Longest common passages of a query and a text: a sorted array of sampled suffixes, searched by bisection.

Every `stride`-th byte of the text begins a suffix. The suffixes are sorted by their first DEPTH bytes, in segments that
are sorted one by one, so memory is bounded. A common passage of n bytes contains a sampled suffix that shares at least
n - stride + 1 bytes with the query; bisection finds it, and the passage is then extended to both sides in the text.

The text begins and ends with PAD, and SEPARATOR stands between documents. Neither byte occurs in utf-8, so no match
extends past a document or past the query.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SEPARATOR = b"\xff"
PAD = SEPARATOR * 8
"""The first and last bytes of a text: words of 8 bytes are read at any offset of a document."""
_QUERY_PAD = b"\xfe" * 8
DEPTH = 256
"""Bytes by which suffixes are sorted."""
SEGMENT = 1 << 22
"""Suffixes per segment: sorting one takes about 300 MB of memory."""
NEIGHBORS = 32
"""Most suffixes that are read before, and after, the position of a query in the order of a segment."""
_KEY_STEP = 64
"""The first 8 bytes of every suffix of this number are kept in memory: they narrow the bisection."""
_LANES = 1 << 17
"""Most (query offset, segment) pairs searched at a time."""
POSITION_DTYPE = np.dtype("<u4")


class Matches(NamedTuple):
    """Maximal common passages: none can be extended to either side. Arrays of equal length."""

    start: np.ndarray
    """Offset in the query, in bytes."""
    end: np.ndarray
    position: np.ndarray
    """Offset in the text."""


def sort_suffixes(text: np.ndarray, stride: int) -> np.ndarray:
    """Return the numbers of the suffixes that begin at every `stride`-th byte, ordered by their first DEPTH bytes.

    Prefix doubling: suffixes that are equal in d bytes are ordered by the rank of what follows these d bytes, which
    orders them by 2 d. Only suffixes that are still equal to another are sorted again.
    """
    n = -(-len(text) // stride)
    if not n:
        return np.empty(0, dtype=POSITION_DTYPE)
    padded = np.zeros(n * stride + 8, dtype=np.uint8)
    padded[: len(text)] = text
    words = np.ndarray((n,), dtype=">u8", buffer=padded.data, strides=(stride,)).astype(np.uint64)
    del padded
    order = np.argsort(words)
    words = words[order]
    begins = _changes(words)
    del words
    rank = np.empty(n, dtype=np.int32)
    rank[order] = np.maximum.accumulate(np.where(begins, np.arange(n, dtype=np.int32), 0))
    sorted_bytes = 8
    while sorted_bytes < DEPTH:
        equal = np.flatnonzero(~(begins & np.append(begins[1:], True)))
        if not len(equal):
            break
        suffixes = order[equal]
        following = suffixes + sorted_bytes // stride
        key = np.where(following < n, rank[np.minimum(following, n - 1)].astype(np.int64) + 1, 0)
        key += rank[suffixes].astype(np.int64) * (n + 1)
        by_key = np.argsort(key)
        suffixes = suffixes[by_key]
        order[equal] = suffixes
        begins[equal] = _changes(key[by_key])
        rank[suffixes] = np.maximum.accumulate(np.where(begins[equal], equal, 0))
        sorted_bytes *= 2
    return order.astype(POSITION_DTYPE)


def _changes(values: np.ndarray) -> np.ndarray:
    """Whether each value differs from the one before it; True for the first."""
    changes = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def segment_slices(size: int, stride: int) -> list[tuple[int, int]]:
    """Return [begin, end) of each segment of a text of `size` bytes, without the PAD at its end."""
    width, size = SEGMENT * stride, size - len(PAD)
    return [(begin, min(begin + width, size)) for begin in range(0, size, width)]


def sort_segment(text: np.ndarray, size: int, stride: int) -> np.ndarray:
    """Return the order of the suffixes that begin in the first `size` bytes; `text` has up to DEPTH bytes more."""
    order = sort_suffixes(text, stride)
    return order[order < -(-size // stride)]


class SuffixSearch:
    """The text and the order of its suffixes, ready for queries. Reads only, so threads can share it."""

    def __init__(self, text: np.ndarray, suffixes: np.ndarray, stride: int) -> None:
        """text: uint8, between two PADs. suffixes: the orders of all segments, one after the other."""
        self.text, self.stride = text, stride
        self._suffixes = suffixes
        self._words = _words(text)
        slices = segment_slices(len(text), stride)
        self._begins = np.array([begin for begin, _ in slices], dtype=np.int64)
        self._counts = np.array([-(-(end - begin) // stride) for begin, end in slices], dtype=np.int64)
        self._first = np.cumsum(self._counts) - self._counts
        """Segment -> index of its first entry in `suffixes`."""
        self._keys = [
            self._words[self._positions(np.arange(first, first + count, _KEY_STEP), segment)].byteswap()
            for segment, (first, count) in enumerate(zip(self._first, self._counts, strict=True))
        ]

    def find(self, query: bytes, shortest: int) -> Matches:
        """Return the maximal matches of at least `shortest` bytes, each once.

        All are found if fewer than NEIGHBORS suffixes of a segment share `shortest - stride + 1` bytes with the query.
        Among more, the longest ones are found; only up to `stride - 1` bytes at the start of a match can be missed.
        """
        padded = np.frombuffer(_QUERY_PAD + query + _QUERY_PAD, dtype=np.uint8)
        words, begin = _words(padded), len(_QUERY_PAD)
        per_chunk = max(_LANES // len(self._begins), 1)
        shared = max(shortest - self.stride + 1, 1)
        found = [
            self._candidates(words, np.arange(i, min(i + per_chunk, begin + len(query))), shared)
            for i in range(begin, begin + len(query), per_chunk)
        ]
        nothing = (np.empty(0, dtype=np.int64),) * 3
        offset, position, length = (np.concatenate(column) for column in zip(nothing, *found, strict=True))
        # Candidates of one match lie on one diagonal and overlap: keep the first of them, and how far they reach.
        by_diagonal = np.lexsort((offset, position - offset))
        offset, position, length = offset[by_diagonal], position[by_diagonal], length[by_diagonal]
        first = np.ones(len(offset), dtype=bool)
        first[1:] = (np.diff(position - offset) != 0) | (offset[1:] > (offset + length)[:-1])
        known = np.maximum.reduceat(offset + length, np.flatnonzero(first)) if len(offset) else offset
        offset, position = offset[first], position[first]
        known -= offset
        left = _common(self._words, position, words, offset, backward=True)
        right = known + _common(self._words, position + known, words, offset + known)
        long = left + right >= shortest
        matches = np.stack((offset - left - begin, offset + right - begin, position - left), axis=1)[long]
        return Matches(*np.unique(matches, axis=0).T)

    def _candidates(self, query: np.ndarray, offsets: np.ndarray, shared: int) -> tuple[np.ndarray, ...]:
        """(query offset, text position, common bytes up to DEPTH) of sampled suffixes with `shared` common bytes."""
        segments = len(self._begins)
        offset = np.repeat(offsets, segments)
        segment = np.tile(np.arange(segments), len(offsets))
        first, last = self._first[segment], self._first[segment] + self._counts[segment]
        insertion = self._bisect(query, offset, segment, *self._narrow(query[offsets]))
        found: list[tuple[np.ndarray, ...]] = []
        for step, entry in ((1, insertion), (-1, insertion - 1)):
            lanes = np.arange(len(offset))
            for distance in range(NEIGHBORS):
                at = entry[lanes]
                inside = (at >= first[lanes]) & (at < last[lanes])
                lanes, at = lanes[inside], at[inside]
                if not len(lanes):
                    break
                position = self._positions(at, segment[lanes])
                length = _common(self._words, position, query, offset[lanes], most=DEPTH)
                near = length >= shared
                lanes, position, length = lanes[near], position[near], length[near]
                entry[lanes] += step
                if distance:  # a match that begins 8 bytes earlier is a candidate there; the longest is kept here too
                    new = self._words[position - 8] != query[offset[lanes] - 8]
                else:
                    new = np.ones(len(lanes), dtype=bool)
                found.append((offset[lanes[new]], position[new], length[new]))
        return tuple(np.concatenate(columns) for columns in zip(*found, strict=True)) if found else (offsets[:0],) * 3

    def _narrow(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the bisection by the first 8 bytes, for every word and segment, in this order."""
        keys = words.byteswap()
        before = np.stack([np.searchsorted(each, keys, side="left") for each in self._keys], axis=1)
        after = np.stack([np.searchsorted(each, keys, side="right") for each in self._keys], axis=1)
        low = self._first + np.maximum((before - 1) * _KEY_STEP + 1, 0)
        high = self._first + np.minimum(after * _KEY_STEP, self._counts)
        return low.ravel(), high.ravel()

    def _positions(self, entries: np.ndarray, segment: np.ndarray | int) -> np.ndarray:
        return self._begins[segment] + self._suffixes[entries].astype(np.int64) * self.stride

    def _bisect(
        self, query: np.ndarray, offset: np.ndarray, segment: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """The first entry of [low, high] whose suffix is not smaller than the query from an offset on."""
        lanes = np.flatnonzero(low < high)
        while len(lanes):
            middle = (low[lanes] + high[lanes]) // 2
            smaller = self._is_smaller(self._positions(middle, segment[lanes]), query, offset[lanes])
            low[lanes[smaller]] = middle[smaller] + 1
            high[lanes[~smaller]] = middle[~smaller]
            lanes = lanes[low[lanes] < high[lanes]]
        return low

    def _is_smaller(self, position: np.ndarray, query: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Whether each suffix is smaller than the query from an offset on, in their first DEPTH bytes."""
        smaller = np.zeros(len(position), dtype=bool)
        lanes = np.arange(len(position))
        for done in range(0, DEPTH, 8):
            ours, theirs = self._words[position[lanes] + done], query[offset[lanes] + done]
            differ = ours != theirs
            smaller[lanes[differ]] = ours[differ].byteswap() < theirs[differ].byteswap()
            lanes = lanes[~differ]
            if not len(lanes):
                break
        return smaller


def _words(data: np.ndarray) -> np.ndarray:
    """A view of the 8 bytes at every offset, little-endian."""
    return np.ndarray((max(len(data) - 7, 0),), dtype="<u8", buffer=data.data, strides=(1,))


def _common(
    text: np.ndarray,
    position: np.ndarray,
    query: np.ndarray,
    offset: np.ndarray,
    *,
    backward: bool = False,
    most: int | None = None,
) -> np.ndarray:
    """Number of equal bytes from a position of the text and an offset of the query on, or before them.

    Counted up to `most`; before them, every pair must differ somewhere.
    """
    common = np.zeros(len(position), dtype=np.int64)
    lanes, done = np.arange(len(position)), 0
    shifts = _SHIFTS[::-1] if backward else _SHIFTS  # the lowest byte of a word is the first one in memory
    while len(lanes) and (most is None or done < most):
        at = -8 - done if backward else done
        differing = text[position[lanes] + at] ^ query[offset[lanes] + at]
        ended = differing != 0
        equal = (differing[ended, None] >> shifts) & 255 == 0
        common[lanes[ended]] = done + np.argmin(equal, axis=1)
        lanes, done = lanes[~ended], done + 8
        common[lanes] = done
    return common


_SHIFTS = np.arange(0, 64, 8, dtype=np.uint64)
