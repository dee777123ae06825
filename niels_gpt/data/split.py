"""Held-out items, chosen by a seeded permutation."""

from __future__ import annotations

from collections.abc import Sequence
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
