"""Splits: complete items by a seeded permutation, or a byte string by shares or sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

Item = TypeVar("Item")


def split_items(items: Sequence[Item], *, val_frac: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Return (train, val), both in input order; they depend on the number of items, val_frac and seed.

    With fewer than two items, or val_frac 0, val is empty; otherwise it has at least one item, and train too.
    Raises ValueError for a val_frac outside [0, 1].
    """
    held_out = set(shuffled(range(len(items)), seed)[: number_held_out(len(items), val_frac)])
    train = [item for i, item in enumerate(items) if i not in held_out]
    val = [item for i, item in enumerate(items) if i in held_out]
    return train, val


def number_held_out(n: int, val_frac: float) -> int:
    """Return how many of n items are held out; see `split_items`."""
    check_val_frac(val_frac)
    return 0 if n < 2 or val_frac == 0 else min(n - 1, max(1, int(n * val_frac)))


def check_val_frac(val_frac: float, name: str = "val_frac") -> None:
    """Raise ValueError for a held-out fraction outside [0, 1]."""
    if not 0.0 <= val_frac <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {val_frac!r}")


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the items in a random order that depends on the seed."""
    import torch  # a local import: listing the sources must not take two seconds

    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[i] for i in order.tolist()]


PARTS = ("train", "val", "test")
"""Names of the parts of SourceConfig.split, in order."""


def cut(size: int, split: Sequence[int | float]) -> dict[str, tuple[int, int]]:
    """Return {part: (first byte, end)} of a byte string of `size` bytes that is split into two or three parts.

    Integers are numbers of bytes; bytes after the last part belong to no part. Shares are exact decimals: 0.9 of
    1,115,394 bytes ends at byte 1,003,854, and 0.7 and 0.2 of ten end at byte 9.
    Raises ValueError if there are fewer bytes than requested.
    """
    if all(isinstance(part, int) for part in split):
        ends = [int(end) for end in itertools.accumulate(split)]
        if ends[-1] > size:
            raise ValueError(f"split {list(split)} needs {ends[-1]:,} bytes, but the source has {size:,}")
    else:
        exact = list(itertools.accumulate(Fraction(str(part)) for part in split))
        ends = [*(int(size * end) for end in exact[:-1]), size]
    return dict(zip(PARTS, itertools.pairwise((0, *ends)), strict=False))
