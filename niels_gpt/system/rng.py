"""Seeded generators and hashes: all random numbers come from a torch.Generator argument, or from here by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # modules that need hashes only are imported without torch
    import numpy as np
    import torch

AnyItem = TypeVar("AnyItem")


def set_seed(seed: int) -> None:
    """Seed torch's default generator, which model initialization and dropout use."""
    import torch

    torch.manual_seed(seed)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed for one purpose, e.g. `derive_seed(seed, "batch", step)`.

    It is a hash, so that neighboring seeds and steps give unrelated streams, the same on every machine.
    """
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class HashedDraws:
    """Choices that a seed determines, as those of `random.Random`: draw n is a hash of (seed, n)."""

    def __init__(self, seed: int) -> None:
        self._seed, self._number = seed, 0

    def random(self) -> float:
        """Return a number in [0, 1)."""
        self._number += 1
        return (derive_seed(self._seed, self._number) >> 10) / 2**53

    def randrange(self, stop: int) -> int:
        """Return one of 0..stop-1."""
        return int(self.random() * stop)

    def choice(self, items: Sequence[AnyItem]) -> AnyItem:
        """Return one of the items."""
        return items[self.randrange(len(items))]

    def sample(self, items: Sequence[AnyItem], number: int) -> list[AnyItem]:
        """Return so many different ones of the items, in random order."""
        left = list(items)
        return [left.pop(self.randrange(len(left))) for _ in range(number)]


def mix(values: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each number (the SplitMix64 finalizer)."""
    import numpy as np

    x = values.astype(np.uint64, copy=True)
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def generator(seed: int, *parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded for one purpose; see `derive_seed`."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *parts) if parts else seed)


def seeded_or_random(seed: int | None) -> torch.Generator:
    """Return a CPU generator with this seed; None draws a seed from the system."""
    import torch

    if seed is not None:
        return generator(seed)
    made = torch.Generator()
    made.seed()
    return made
