"""How often each document is drawn: shares, integer quotas, constant-time sampling, and weights near document edges."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from niels_gpt.config.splice import check_options


def parse_weights(given: Any, number: int) -> np.ndarray:
    """doc_weights as float64. Raises ValueError unless it is one finite number of at least 0 per document."""
    try:
        if np.asarray(given).dtype.kind in "SU":
            raise ValueError
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"doc_weights must be a list of numbers, got {reprlib.repr(given)}") from None
    if weights.shape != (number,):
        raise ValueError(f"doc_weights has {weights.size} numbers, but there are {number} documents")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError(f"doc_weights must be finite numbers of at least 0, got {weights.tolist()}")
    return weights


def per_document(name: str, given: Any, number: int) -> np.ndarray:
    """An option that is one value, or one per document, as an array with a value per document.

    Raises ValueError that names the first value outside the limits of the option.
    """
    if isinstance(given, list | tuple | np.ndarray):
        if len(given) != number:
            raise ValueError(f"{name} has {len(given)} values, but there are {number} documents")
        return np.array([check_options({name: value})[name] for value in given])
    return np.full(number, check_options({name: given})[name])


def distinct_pairs(first: np.ndarray, second: np.ndarray) -> tuple[list[tuple[Any, Any]], np.ndarray]:
    """The distinct pairs (first[i], second[i]) in ascending order, and the index of the pair of each i."""
    # `np.unique(axis=1)` does this too, but takes 1.4 s for a million pairs: it compares them as bytes.
    (firsts, code), (seconds, second_code) = (np.unique(a, return_inverse=True) for a in (first, second))
    pairs, which = np.unique(code * len(seconds) + second_code, return_inverse=True)
    at = np.divmod(pairs, max(len(seconds), 1))
    return list(zip(firsts[at[0]].tolist(), seconds[at[1]].tolist(), strict=True)), which


def parse_groups(given: Any, number: int) -> list[Hashable]:
    """Group labels as a list. Raises ValueError unless there is one hashable label per document."""
    try:
        labels = list(given)
        hash(tuple(labels))
    except TypeError:
        raise ValueError(f"groups must have a label (text or number) per document, got {reprlib.repr(given)}") from None
    if len(labels) != number:
        raise ValueError(f"groups has {len(labels)} labels, but there are {number} documents")
    return labels


class DocumentShares:
    """P(document), proportional to weight * length ** tau over the usable documents; groups get equal shares."""

    def __init__(
        self,
        lengths: np.ndarray,
        usable: np.ndarray,
        tau: float,
        weights: np.ndarray | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        """Raises ValueError if all usable documents have weight 0."""
        self._mass = np.where(usable, np.maximum(lengths, 1).astype(np.float64) ** tau, 0.0)
        self._weights = None if weights is None else np.where(usable, weights, 0.0)
        if self._weights is not None and not self._weights.any():
            raise ValueError("doc_weights is 0 for every document that has examples: give one a positive weight")
        self._group = np.zeros(len(lengths), dtype=np.int64)
        if groups is not None:
            number = {label: i for i, label in enumerate(dict.fromkeys(groups))}
            self._group = np.array([number[label] for label in groups])
        self._grouped, self._groups = groups is not None, int(self._group.max()) + 1

    def floats(self) -> np.ndarray:
        """(N,) float64 that sum to 1."""
        share, group = self._mass, self._group
        if self._weights is not None:
            largest = np.zeros(self._groups)
            np.maximum.at(largest, group, self._weights)
            # Scaling by a power of two is exact, and keeps the sums within the range of floats.
            share = share * np.ldexp(self._weights, -np.frexp(largest)[1][group])
        if self._grouped:
            totals = np.bincount(group, weights=share)
            share = np.divide(share, totals[group], out=np.zeros_like(share), where=totals[group] > 0)
        return share / share.sum()

    def quotas(self, total: int) -> np.ndarray:
        """(N,) int64 that sum to `total`: the largest-remainder rounding of total * share.

        Remainders are compared to nine digits; ties go to the lower index. Computed in integers: floats have too few
        digits for the remainders of a long epoch.
        """
        mass = _integers(self._mass)
        if self._weights is not None:
            mass = mass.astype(object) * _integers(self._weights).astype(object)
        most = int(mass.max()) * len(mass) * self._groups * total
        mass = mass.astype(np.int64 if most < 2**63 else object)
        sums = np.zeros(self._groups, dtype=mass.dtype)
        np.add.at(sums, self._group, mass)
        divisor = np.maximum(sums * np.count_nonzero(sums), 1)[self._group]  # a group may have no mass
        quotas = total * mass // divisor
        remainder = np.round(((total * mass - quotas * divisor) / divisor).astype(np.float64), 9)
        first = np.argsort(-remainder, kind="stable")[: total - int(quotas.sum())]
        quotas[first] += 1
        return quotas.astype(np.int64)


def _integers(values: np.ndarray) -> np.ndarray:
    """The smallest integers in exactly the proportions of non-negative floats, of which at least one is positive."""
    fraction, exponent = np.frexp(values)
    digits = np.ldexp(fraction, 53).astype(np.int64)
    positive = digits > 0
    zeros = np.where(positive, np.frexp((digits & -digits).astype(np.float64))[1] - 1, 0)  # trailing zero bits
    digits, exponent = digits >> zeros, exponent + zeros
    shift = np.where(positive, exponent - exponent[positive].min(), 0)
    if int((np.frexp(digits.astype(np.float64))[1] + shift).max()) < 63:
        return digits << shift
    return np.left_shift(digits.astype(object), shift.astype(object))


def spread(j: np.ndarray, counts: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """floor((j + 1/2) * counts / quotas), exactly: the span numbers of a quota, evenly spaced over all spans."""
    if not len(j) or (2 * int(j.max()) + 1) * int(counts.max()) < 2**63:
        return (2 * j + 1) * counts // (2 * quotas)
    exact = (2 * j.astype(object) + 1) * counts.astype(object) // (2 * quotas.astype(object))
    return exact.astype(np.int64)


def first_spread(numbers: np.ndarray, count: int, quota: int) -> np.ndarray:
    """The first j of a quota with spread(j, count, quota) >= number, for each number: where its examples begin.

    This is ceil((2 * quota * number - count) / (2 * count)), exactly.
    """
    if max(count, quota) < 2**50:
        # The product may exceed 64 bits, but the float is off by one at most, so the remainder is small: it is exact
        # although both of its terms wrap around.
        near = (numbers * (quota / count)).astype(np.int64)
        remainder = numbers * (2 * quota) - count - near * (2 * count)
        j = near - (-remainder // (2 * count))
    else:
        j = -((count - 2 * quota * numbers.astype(object)) // (2 * count))
    return np.maximum(j, 0).astype(np.int64)


class AliasTable:
    """Draws from a distribution over N documents with one lookup (Walker's alias method).

    Every column of the table has height 1/N and holds at most two documents: its own, and an alias on top. The table is
    built with prefix sums: the excess of large columns fills the deficits of small ones in order, and a large column
    that drops below 1 is filled by the next large one.
    """

    def __init__(self, shares: np.ndarray) -> None:
        n = len(shares)
        height = np.asarray(shares, dtype=np.float64) * n
        self.keep = np.ones(n)
        self.alias = np.arange(n)
        small, large = np.flatnonzero(height < 1), np.flatnonzero(height >= 1)
        if not len(small) or not len(large):
            return
        deficit, excess = np.cumsum(1 - height[small]), np.cumsum(height[large] - 1)
        giver = np.searchsorted(excess, deficit - (1 - height[small]), side="right")
        self.keep[small] = height[small]
        self.alias[small] = large[np.minimum(giver, len(large) - 1)]
        # The small column after which each large one has dropped below 1 itself.
        last = np.searchsorted(deficit, excess[:-1], side="left")
        short = last < len(small)
        self.keep[large[:-1][short]] = np.clip(1 + excess[:-1][short] - deficit[last[short]], 0.0, 1.0)
        self.alias[large[:-1][short]] = large[1:][short]

    def draw(self, where: np.ndarray, which: np.ndarray) -> np.ndarray:
        """The documents for two uniform numbers each: `where` picks a column, `which` its document or the alias."""
        column = np.minimum((where * len(self.keep)).astype(np.int64), len(self.keep) - 1)
        return np.where(which < self.keep[column], column, self.alias[column])


class EdgeWeights:
    """w(t) = (K / d(t)) ** alpha with d(t) = min(t + 1, L - K - t + 1, K), for the starts t = 0, stride, ... <= L - K.

    d is the distance from the nearer end of the document, capped at K, so the cumulative weight of a start is a table
    lookup near the ends and linear between them: O(K) memory for any number of documents of any length.
    """

    def __init__(self, K: int, stride: int, alpha: float) -> None:
        self.K, self.stride, self.alpha = K, stride, alpha
        width = -(-K // stride) + 1  # from here on all weights are equal
        rows = min(stride, K) + 1
        distance = np.minimum(np.arange(rows)[:, None] + np.arange(width) * stride + 1, K)
        # Dividing by K ** alpha changes no quantile and makes the largest weight 1 for every alpha.
        weights = distance.astype(np.float64) ** -alpha
        self._middle = float(K) ** -alpha
        self._sums = np.concatenate((np.zeros((rows, 1)), np.cumsum(weights, axis=1)), axis=1)
        """[distance of the last start from the end (0: left edge), number of starts] -> cumulative weight."""

    def _upto(self, row: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Sum of the first `number` weights, counted from an edge."""
        width = self._sums.shape[1] - 1
        return self._sums[row, np.minimum(number, width)] + np.maximum(number - width, 0) * self._middle

    def _number(self, row: np.ndarray, sums: np.ndarray, side: str, most: np.ndarray) -> np.ndarray:
        """Number of weights from an edge whose sum is below `sums` (side `right`: at most `sums`), capped at `most`."""
        width = self._sums.shape[1] - 1
        if self.stride == 1 or not row.any():
            inside = np.searchsorted(self._sums[0, 1:], sums, side=side)  # type: ignore[call-overload]
        else:
            inside = np.empty(len(row), dtype=np.int64)
            for r in np.unique(row):
                rows = row == r
                inside[rows] = np.searchsorted(self._sums[r, 1:], sums[rows], side=side)  # type: ignore[call-overload]
        rest = np.maximum(sums - self._sums[row, width], 0.0) / max(self._middle, 1e-300)
        beyond = np.floor(rest) if side == "right" else np.maximum(np.ceil(rest) - 1, 0)
        number = np.where(inside < width, inside, width + np.minimum(beyond, most))
        return np.minimum(number, most).astype(np.int64)

    def start(self, lengths: np.ndarray, quantile: np.ndarray) -> np.ndarray:
        """The j of the start t = j * stride at each quantile of the weights."""
        free = lengths - self.K
        number = free // self.stride + 1
        left = free // 2 // self.stride + 1
        zero = np.zeros_like(free)
        row = np.minimum(free - (number - 1) * self.stride, self._sums.shape[0] - 1)
        from_left = self._upto(zero, left)
        total = from_left + self._upto(row, number - left)
        sums = quantile * total
        near = self._number(zero, sums, "right", left - 1)
        far = number - 1 - self._number(row, total - sums, "left", np.maximum(number - left - 1, 0))
        return np.where((sums < from_left) | (number == left), near, far)


class DocumentEdges:
    """The edge weights of each document; alpha and the stride may differ between documents."""

    def __init__(self, lengths: np.ndarray, K: int, strides: np.ndarray, alphas: np.ndarray) -> None:
        distinct, self._which = distinct_pairs(strides, alphas)
        self._lengths = np.maximum(lengths, K)
        self._edges = [EdgeWeights(K, stride, alpha) for stride, alpha in distinct]

    def start(self, docs: np.ndarray, quantile: np.ndarray) -> np.ndarray:
        """The j of the start t = j * stride at each quantile of the weights of each document."""
        if len(self._edges) == 1:
            return self._edges[0].start(self._lengths[docs], quantile)
        numbers = np.empty(len(docs), dtype=np.int64)
        which = self._which[docs]
        for i in np.unique(which).tolist():
            rows = which == i
            numbers[rows] = self._edges[i].start(self._lengths[docs[rows]], quantile[rows])
        return numbers
