"""Seeded generators. All randomness comes from a torch.Generator argument or from a seed through this module."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy-only modules derive seeds without importing torch
    import torch


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
