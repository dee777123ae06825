"""Seeded generators. All randomness is a torch.Generator handed in or made from a seed here."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the numpy rooms derive seeds too, and need no torch
    import torch


def set_seed(seed: int) -> None:
    """Seed torch's default generator, which model initialisation and dropout use."""
    import torch

    torch.manual_seed(seed)


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. `derive_seed(seed, "batch", step)`.

    A hash, so that neighbouring seeds and steps give unrelated streams, on every machine the same.
    """
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *parts: int | str) -> torch.Generator:
    """A CPU generator seeded for one purpose; see `derive_seed`."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *parts) if parts else seed)
