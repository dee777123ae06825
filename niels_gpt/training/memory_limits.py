"""Memory: reject a model or a batch that can never fit, and name what did not fit when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.model.sizes import number_of_weights
from niels_gpt.system.host_limits import gib, is_out_of_memory, machine_memory, memory_limit_text


class OutOfMemory(ValueError):
    """The device ran out of memory in a step; the weights are those from before the step."""


MEMORY_ERRORS = (RuntimeError, MemoryError)
"""The types that out-of-memory errors have, on a GPU or on the CPU. Other errors share them: see `is_out_of_memory`."""


@contextlib.contextmanager
def reporting_out_of_memory(what: str, error: type[ValueError] = OutOfMemory) -> Iterator[None]:
    """Raise `error`, naming `what` the memory was needed for, if the block runs out of memory."""
    try:
        yield
    except MEMORY_ERRORS as err:
        if not is_out_of_memory(err):
            raise
        raise error(f"out of memory for {what}{memory_limit_text()}") from err


def check_size(config: RunConfig, *, processes: int = 1) -> None:
    """Raise ValueError for a model or a batch that does not fit into the memory of this machine."""
    have, rows, T = machine_memory(), config.train.B // processes, config.model.T
    for what, size, remedy in (
        (f"a model of {weights_text(config.model)}", 4 * number_of_weights(config.model), "a smaller model"),
        (f"a batch of {rows:,} rows of T={T:,} ({gib(16 * rows * T)})", 16 * rows * T, "a smaller train.B or model.T"),
    ):
        if size > have:
            raise ValueError(f"{what} does not fit into the memory of this machine ({gib(have)}): use {remedy}")


def weights_text(config: ModelConfig) -> str:
    """The size of a model for a message: "3,213,824 weights (0.01 GiB)"."""
    weights = number_of_weights(config)
    return f"{weights:,} weights ({gib(4 * weights)})"
