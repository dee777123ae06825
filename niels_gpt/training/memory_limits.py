"""Room in memory: what will never fit is refused at once, and what does not fit now is said by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.model.sizes import number_of_weights


class OutOfMemory(ValueError):
    """The device had no room for an update; the weights are those from before it."""


NO_MEMORY = (RuntimeError, MemoryError)
"""What is raised where there is no room, on a GPU or for this process; and for much else: see `is_out_of_memory`."""


def is_out_of_memory(err: Exception) -> bool:
    """Whether an error says that there was no room."""
    signs = ("DefaultCPUAllocator", "bad_alloc", "out of memory", "a primitive")  # the last is all that oneDNN says
    return isinstance(err, torch.OutOfMemoryError | MemoryError) or any(sign in str(err) for sign in signs)


@contextlib.contextmanager
def reporting_out_of_memory(what: str, error: type[ValueError] = OutOfMemory) -> Iterator[None]:
    """Raise `error` where the block finds no memory, with what it was needed for."""
    try:
        yield
    except NO_MEMORY as err:
        if not is_out_of_memory(err):
            raise
        raise error(f"no memory is left for {what}") from err


def check_size(config: RunConfig, *, processes: int = 1) -> None:
    """Raise ValueError for a model or a batch that the memory of this machine could never hold."""
    have, rows, T = machine_memory(), config.train.B // processes, config.model.T
    for what, size, remedy in (
        (f"a model of {weights_text(config.model)}", 4 * number_of_weights(config.model), "a smaller model"),
        (f"a batch of {rows:,} rows of T={T:,} ({gib(16 * rows * T)})", 16 * rows * T, "a smaller train.B or T"),
    ):
        if size > have:
            raise ValueError(f"{what} does not fit into the memory of this machine ({gib(have)}): take {remedy}")


def machine_memory() -> int:
    """Bytes of this machine, or of the limit of this process (ulimit -v)."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole if limit == resource.RLIM_INFINITY else min(whole, limit)


def weights_text(config: ModelConfig) -> str:
    """3,213,824 weights (0.01 GiB)."""
    number = number_of_weights(config)
    return f"{number:,} weights ({gib(4 * number)})"


def gib(size: int) -> str:
    """1.50 GiB, for bytes."""
    return f"{size / 2**30:,.2f} GiB" if size < 2**40 else f"{size // 2**30:,} GiB"
