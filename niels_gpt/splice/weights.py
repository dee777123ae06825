"""How often: shares of documents, whole numbers that add up, draws in constant time, and weights near the edges."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def document_shares(
    lengths: np.ndarray,
    usable: np.ndarray,
    tau: float,
    weights: np.ndarray | None = None,
    groups: Sequence[Hashable] | None = None,
) -> np.ndarray:
    """P(document), in proportion to weight * length ** tau among the usable ones; groups get equal shares.

    Raises ValueError where no usable document has a weight.
    """
    share = np.where(usable, np.maximum(lengths, 1).astype(np.float64) ** tau, 0.0)
    if weights is not None:
        share *= weights
    if groups is not None:
        number = {label: i for i, label in enumerate(dict.fromkeys(groups))}
        group = np.array([number[label] for label in groups])
        totals = np.bincount(group, weights=share, minlength=len(number))
        share = np.divide(share, totals[group], out=np.zeros_like(share), where=totals[group] > 0)
    total = share.sum()
    if not total > 0:
        raise ValueError("doc_weights gives every document that has examples the weight 0: nothing is left to draw")
    return share / total


def largest_remainder(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers nearest to total * shares that add up to total; ties go to the lower index."""
    exact = total * shares
    whole = np.floor(exact + 1e-9).astype(np.int64)
    left = total - int(whole.sum())
    first = np.argsort(-np.round(exact - whole, 9), kind="stable")[:left]
    whole[first] += 1
    return whole


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
