"""How often: shares of documents, whole numbers that add up, draws in constant time, and weights near the edges."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


def read_weights(given: Any, number: int) -> np.ndarray:
    """doc_weights as float64. Raises ValueError for what is not one finite number of at least 0 per document."""
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


def read_groups(given: Any, number: int) -> list[Hashable]:
    """The labels of groups. Raises ValueError for what is not one label per document."""
    try:
        labels = list(given)
        hash(tuple(labels))
    except TypeError:
        raise ValueError(f"groups must be a label (text or a number) per document, got {reprlib.repr(given)}") from None
    if len(labels) != number:
        raise ValueError(f"groups has {len(labels)} labels, but there are {number} documents")
    return labels


class DocumentShares:
    """P(document), in proportion to weight * length ** tau among the usable ones; groups get equal shares."""

    def __init__(
        self,
        lengths: np.ndarray,
        usable: np.ndarray,
        tau: float,
        weights: np.ndarray | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        """Raises ValueError where no usable document has a weight."""
        self._mass = np.where(usable, np.maximum(lengths, 1).astype(np.float64) ** tau, 0.0)
        self._weights = None if weights is None else np.where(usable, weights, 0.0)
        if self._weights is not None and not self._weights.any():
            raise ValueError("doc_weights gives every document that has examples the weight 0: nothing is left to draw")
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
            # Scaled by a power of two, which rounds nothing: no sum grows past what a float holds.
            share = share * np.ldexp(self._weights, -np.frexp(largest)[1][group])
        if self._grouped:
            totals = np.bincount(group, weights=share)
            share = np.divide(share, totals[group], out=np.zeros_like(share), where=totals[group] > 0)
        return share / share.sum()

    def quotas(self, total: int) -> np.ndarray:
        """(N,) int64: whole numbers nearest to total * share that add up to total, by largest remainder. Remainders
        count to nine digits; ties go to the lower index.

        In integers: floats have too few digits for the remainders of a long epoch.
        """
        mass = _integers(self._mass)
        if self._weights is not None:
            mass = mass.astype(object) * _integers(self._weights).astype(object)
        most = int(mass.max()) * len(mass) * self._groups * total
        mass = mass.astype(np.int64 if most < 2**63 else object)
        sums = np.zeros(self._groups, dtype=mass.dtype)
        np.add.at(sums, self._group, mass)
        parts = np.maximum(sums * np.count_nonzero(sums), 1)[self._group]  # a group may have no mass
        whole = total * mass // parts
        remainder = np.round(((total * mass - whole * parts) / parts).astype(np.float64), 9)
        first = np.argsort(-remainder, kind="stable")[: total - int(whole.sum())]
        whole[first] += 1
        return whole.astype(np.int64)


def _integers(values: np.ndarray) -> np.ndarray:
    """Whole numbers in exactly the proportions of floats of at least 0, some above it: the smallest such."""
    fraction, exponent = np.frexp(values)
    digits = np.ldexp(fraction, 53).astype(np.int64)
    some = digits > 0
    zeros = np.where(some, np.frexp((digits & -digits).astype(np.float64))[1] - 1, 0)  # at the end of the digits
    digits, exponent = digits >> zeros, exponent + zeros
    shift = np.where(some, exponent - exponent[some].min(), 0)
    if int((np.frexp(digits.astype(np.float64))[1] + shift).max()) < 63:
        return digits << shift
    return np.left_shift(digits.astype(object), shift.astype(object))


def spread(j: np.ndarray, counts: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """floor((j + 1/2) * counts / quotas), exactly: the spans of a quota, evenly over all."""
    if not len(j) or (2 * int(j.max()) + 1) * int(counts.max()) < 2**63:
        return (2 * j + 1) * counts // (2 * quotas)
    exact = (2 * j.astype(object) + 1) * counts.astype(object) // (2 * quotas.astype(object))
    return exact.astype(np.int64)


class AliasTable:
    """Draws from a distribution over N things with one lookup (Walker's method).

    Every column of the table has the height 1/N and holds at most two things: its own, and the alias on top. Built
    with prefix sums: the deficits of small columns are filled by the excess of large ones in order, and a large column
    that has given too much is filled by the next large one.
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
        # After which small column has a large one given so much that it is below 1 itself?
        last = np.searchsorted(deficit, excess[:-1], side="left")
        short = last < len(small)
        self.keep[large[:-1][short]] = np.clip(1 + excess[:-1][short] - deficit[last[short]], 0.0, 1.0)
        self.alias[large[:-1][short]] = large[1:][short]

    def draw(self, where: np.ndarray, which: np.ndarray) -> np.ndarray:
        """The things at two uniform numbers each."""
        column = np.minimum((where * len(self.keep)).astype(np.int64), len(self.keep) - 1)
        return np.where(which < self.keep[column], column, self.alias[column])


class EdgeWeights:
    """w(t) = (K / d(t)) ** alpha with d(t) = min(t + 1, L - K - t + 1, K), for the starts t = 0, stride, ... <= L - K.

    d counts from the nearer end of the document and stops at K, so the sum of weights up to a start is a table lookup
    near the ends and a straight line between them: O(K) memory for any number of documents of any length.
    """

    def __init__(self, K: int, stride: int, alpha: float) -> None:
        self.K, self.stride, self.alpha = K, stride, alpha
        width = -(-K // stride) + 1  # from there on all weights are 1
        rows = min(stride, K) + 1
        distance = np.minimum(np.arange(rows)[:, None] + np.arange(width) * stride + 1, K)
        # Divided by K ** alpha, which changes no quantile: the largest weight is 1, whatever alpha.
        weights = distance.astype(np.float64) ** -alpha
        self._middle = float(K) ** -alpha
        self._sums = np.concatenate((np.zeros((rows, 1)), np.cumsum(weights, axis=1)), axis=1)
        """[distance of the last start from the end (0 for the left side), number of starts] -> the sum of weights."""

    def _upto(self, row: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The sum of the first `number` weights, counted from an edge."""
        width = self._sums.shape[1] - 1
        return self._sums[row, np.minimum(number, width)] + np.maximum(number - width, 0) * self._middle

    def _number(self, row: np.ndarray, sums: np.ndarray, side: str, most: np.ndarray) -> np.ndarray:
        """How many weights from an edge fit below these sums (side `right`: up to and with them); at most `most`."""
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
        """The numbers j of the starts t = j * stride in whose share of the distribution the quantiles lie."""
        free = lengths - self.K
        number = free // self.stride + 1
        left = free // 2 // self.stride + 1
        zero = np.zeros_like(free)
        row = np.minimum(free - (number - 1) * self.stride, self._sums.shape[0] - 1)
        from_left = self._upto(zero, left)
        whole = from_left + self._upto(row, number - left)
        sums = quantile * whole
        near = self._number(zero, sums, "right", left - 1)
        far = number - 1 - self._number(row, whole - sums, "left", np.maximum(number - left - 1, 0))
        return np.where((sums < from_left) | (number == left), near, far)
