"""Damage for tests: copies of a file with one bit flipped."""

import random
from collections.abc import Iterator


def flipped(data: bytes, *, count: int = 100, seed: int = 22) -> Iterator[bytes]:
    """Yield copies of the data, each with another bit flipped."""
    for bit in random.Random(seed).sample(range(8 * len(data)), min(count, 8 * len(data))):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
