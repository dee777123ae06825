"""Permutations as functions, and random numbers by index: any element in constant time, without a list.

The permutation of 0..n-1 is a Feistel network on the cells of an a x b table, a * b >= n, a and b near sqrt(n). Each
round shifts the row by a hash of the column, or the column by a hash of the row. Shifting back inverts it, so every
round is a bijection of the cells. An image >= n is mapped again until it is below n (cycle walking). The walk follows
the cycle of its start, which is below n, so it ends, and different starts end at different images.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from niels_gpt.system.rng import mix as mix

_ROUNDS = 8


def draws(seed: int, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
    """64 random bits for each (epoch, index); `uniform` converts them to floats."""
    return mix(mix(epoch.astype(np.uint64) ^ np.uint64(seed)) ^ mix(index))


def uniform(bits: np.ndarray, draw: int) -> np.ndarray:
    """A float64 in [0, 1) for each; `draw` numbers the independent draws of one example."""
    return (mix(bits + np.uint64(draw)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """Seeded bijections of 0..n-1: one, or with arrays `n` and `seed` a separate one for each position asked for."""

    def __init__(self, n: int | np.ndarray, seed: int | np.ndarray) -> None:
        """Raises ValueError for n below 1."""
        if np.any(np.asarray(n) < 1):
            raise ValueError(f"a permutation needs n >= 1, got n={np.min(n)}")
        self.n = n
        self._rows: Any
        self._columns: Any
        if isinstance(n, np.ndarray):
            rows = np.sqrt((n - 1).astype(np.float64)).astype(np.int64)
            rows += 1 + ((rows + 1) ** 2 <= n - 1) - (rows**2 > n - 1)  # the float may be off by one
            self._rows, self._columns = rows.astype(np.uint64), (-(-n // rows)).astype(np.uint64)
        else:
            side = math.isqrt(n - 1) + 1
            self._rows, self._columns = np.uint64(side), np.uint64(-(-n // side))
        rounds = np.arange(_ROUNDS, dtype=np.uint64)
        self._keys = mix(rounds[:, None] + mix(np.atleast_1d(np.asarray(seed, dtype=np.uint64))))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The elements at these positions, int64."""
        positions = np.asarray(positions, dtype=np.uint64)
        each = np.arange(len(positions)) if isinstance(self.n, np.ndarray) else None
        images = self._once(positions, each)
        outside = np.flatnonzero(images >= self.n)
        while len(outside):
            again = self._once(images[outside], None if each is None else outside)
            images[outside] = again
            limit = self.n[outside] if isinstance(self.n, np.ndarray) else self.n
            outside = outside[again >= limit]
        return images.astype(np.int64)

    def _once(self, x: np.ndarray, each: np.ndarray | None) -> np.ndarray:
        """One pass of the network. `each`: which of the permutations applies to each number; None: the only one."""
        rows, columns, keys = self._rows, self._columns, self._keys
        if each is not None:
            rows, columns = rows[each], columns[each]
            keys = keys[:, each] if keys.shape[1] > 1 else keys
        row, column = np.divmod(x, columns)
        for i, key in enumerate(keys):
            if i % 2:
                column = (column + mix(row ^ key) % columns) % columns
            else:
                row = (row + mix(column ^ key) % rows) % rows
        return row * columns + column
