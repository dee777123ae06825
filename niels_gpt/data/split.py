"""What is held out: whole items, chosen by a seeded permutation, or the end of a run of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

Item = TypeVar("Item")


def split_items(items: Sequence[Item], *, val_frac: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(train, val): whole items, both in input order; the same for the same number, share and seed.

    Fewer than two items, or val_frac 0, hold out none; otherwise at least one and never all.
    Raises ValueError for a val_frac outside [0, 1].
    """
    if not 0.0 <= val_frac <= 1.0:
        raise ValueError(f"val_frac must be in [0, 1], got {val_frac!r}")
    import torch  # here: listing the sources must not cost two seconds

    n = len(items)
    n_val = 0 if n < 2 or val_frac == 0 else min(n - 1, max(1, int(n * val_frac)))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    held_out = set(order[:n_val].tolist())
    train = [item for i, item in enumerate(items) if i not in held_out]
    val = [item for i, item in enumerate(items) if i in held_out]
    return train, val


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """The items in an order that the seed decides."""
    import torch

    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[i] for i in order.tolist()]


PARTS = ("train", "val", "test")
"""What the numbers of SourceConfig.split stand for, in their order."""


def cut(size: int, split: Sequence[int | float]) -> dict[str, tuple[int, int]]:
    """Part -> (first byte, end) of a run of `size` bytes that is cut in two or three, one after the other.

    Whole numbers are bytes, and what follows them is in no part. Shares are taken as they are written: after 0.9 of
    1,115,394 bytes comes byte 1,003,854, and after 0.7 and 0.2 of ten comes byte 9.
    Raises ValueError where there are fewer bytes than asked for.
    """
    if all(isinstance(part, int) for part in split):
        ends = [int(end) for end in itertools.accumulate(split)]
        if ends[-1] > size:
            raise ValueError(f"split {list(split)} asks for {ends[-1]:,} bytes, but there are {size:,}")
    else:
        exact = list(itertools.accumulate(Fraction(str(part)) for part in split))
        ends = [*(int(size * end) for end in exact[:-1]), size]
    return dict(zip(PARTS, itertools.pairwise((0, *ends)), strict=False))
