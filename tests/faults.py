"""Faults for tests: files with one bit flipped, and processes that die while they write."""

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def flipped(data: bytes, *, count: int = 100, seed: int = 22) -> Iterator[bytes]:
    """Yield copies of the data, each with another bit flipped."""
    for bit in random.Random(seed).sample(range(8 * len(data)), min(count, 8 * len(data))):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child process that dies at its n-th rename or fsync, from 0; False if it has fewer of them."""
    child = os.fork()
    if child == 0:
        left = itertools.count(number, -1)
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (Path, "replace"), (Path, "rename")):
            setattr(owner, name, _dying(left, getattr(owner, name)))
        try:
            work()
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -9), status
    return status == -9


def _dying(left: Iterator[int], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return wrapped
