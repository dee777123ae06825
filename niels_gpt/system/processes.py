"""The processes of a run: one, or as many as torchrun has started.

Every process plans the full batch of a step and trains on its share of the rows. Control messages (a signal, a path, an
error during set-up) use a separate gloo group on the CPU with a very long timeout. A process that dies closes its
connections, so the others notice at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from niels_gpt.system.console import OtherProcessFailed
from niels_gpt.system.device import resolve_device

TIMEOUT = timedelta(minutes=15)
"""Limit for the rendezvous, and for one collective on gradients or weights."""
CONTROL_TIMEOUT = timedelta(days=7)
"""Limit for work that one process does while the others wait: reading data, writing a checkpoint."""

T = TypeVar("T")


class RankShare(NamedTuple):
    """The share of process `rank` among `size` processes; by default everything."""

    rank: int = 0
    size: int = 1

    def rows(self, count: int) -> slice:
        """Which of `count` items belong to this share. Shares are contiguous, and differ by at most one item."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


ALL_ROWS = RankShare()
"""The share of a single process: all rows."""


@dataclass(frozen=True)
class World:
    """One process among `size`. With size 1 no method communicates."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """The device of this process."""
    restarts: int = 0
    """How often torchrun has restarted all processes."""
    control: Any = field(default=None, repr=False)
    """The gloo group for control messages; None for a single process."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def share(self) -> RankShare:
        """The share of this process."""
        return RankShare(self.rank, self.size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place. On a GPU the call does not block."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def sum_arrays(self, *arrays: float | np.ndarray) -> list[np.ndarray]:
        """The sum of each number or array over all processes, in float64."""
        doubles = [np.asarray(array, dtype=np.float64) for array in arrays]
        if self.size == 1:
            return doubles
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in doubles]))
        torch.distributed.all_reduce(flat, group=self.control)
        sums = np.split(flat.numpy(), np.cumsum([array.size for array in doubles])[:-1])
        return [total.reshape(array.shape) for total, array in zip(sums, doubles, strict=True)]

    def max(self, number: int) -> int:
        """The largest `number` of all processes."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self.control)
        return int(tensor)

    def all_gather(self, value: T) -> list[T]:
        """The (small) values of all processes, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: T) -> T:
        """The (small) value of the main process."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until all processes arrive."""
        if self.size > 1:
            torch.distributed.barrier(group=self.control)

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that either succeeds on all processes or fails on all. It must not communicate itself.

        The lowest rank that failed raises its own error. All other processes raise OtherProcessFailed, which a command
        turns into exit code 1 without a message.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as err:
            error = err
            if self.size == 1:
                raise
        failed = [rank for rank, bad in enumerate(self.all_gather(error is not None)) if bad]
        if failed and failed[0] == self.rank and error is not None:
            raise error
        if failed:
            raise OtherProcessFailed(f"rank {failed[0]} failed")

    def main_first(self, build: Callable[[], T]) -> T:
        """Call `build` on the main process, then on the others, which find the caches that it wrote."""
        built: list[T] = []
        for turn in (self.is_main, not self.is_main):
            with self.fail_together():
                if turn:
                    built.append(build())
        return built[0]


SINGLE_PROCESS = World()
"""A run in one process."""


@contextlib.contextmanager
def open_world(device: str = "auto") -> Iterator[World]:
    """The world that torchrun's environment variables describe; without them a single process.

    Raises ValueError for a device that several processes cannot use, and ConnectionError if the processes do not find
    each other or one is lost. Errors of ranks other than 0 carry their rank in the message.
    """
    size, restarts = _variable("WORLD_SIZE", 1), _variable("TORCHELASTIC_RESTART_COUNT", 0)
    if size == 1:
        yield World(device=resolve_device(device), restarts=restarts)
        return
    rank, local_rank = _variable("RANK"), _variable("LOCAL_RANK")
    try:
        rank_device = device_of_rank(resolve_device(device), local_rank)
        with _connection_errors(size):
            control = _connect(rank_device, rank, size, restarts)
            yield World(rank, size, rank_device, restarts, control)
    except OtherProcessFailed:  # all processes end here
        _leave()
        raise
    except (ValueError, OSError, ArithmeticError) as err:  # do not _leave: the others may wait for this process
        if rank == 0:
            raise
        raise ValueError(f"rank {rank}: {err}") from err
    except SystemExit:  # all processes exit with the same code, e.g. after a signal
        _leave()
        raise
    _leave()


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _variable(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise ValueError(f"WORLD_SIZE is set, but {name} is not: start several processes with torchrun")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be an integer, got {text!r}") from None


def device_of_rank(device: str, local_rank: int) -> str:
    """The device of a process: one GPU each, or the CPU for all. Raises ValueError if there is none."""
    kind, _, index = device.partition(":")
    if index or kind not in ("cpu", "cuda"):
        raise ValueError(f"several processes run on --device cuda (one GPU each) or --device cpu, not on {device}")
    if kind == "cpu":
        return device
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(
            f"process {local_rank} of this machine has no GPU: this machine has {gpus}; use --nproc-per-node={gpus}"
        )
    return f"cuda:{local_rank}"


def _connect(device: str, rank: int, size: int, restarts: int) -> Any:
    """Join the process group; returns the group for control messages."""
    cuda = torch.device(device) if device != "cpu" else None
    if cuda is not None:
        torch.cuda.set_device(cuda)
    store, *_ = next(torch.distributed.rendezvous("env://", rank, size, timeout=TIMEOUT))
    # After a restart torchrun may keep its store, with the addresses of the dead processes.
    store = torch.distributed.PrefixStore(f"start {restarts}", store)
    backend = "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=cuda
    )
    return torch.distributed.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)


@contextlib.contextmanager
def _connection_errors(size: int) -> Iterator[None]:
    """Raise ConnectionError for the errors that torch raises when another process does not answer."""
    try:
        yield
    except RuntimeError as err:
        text = str(err)
        if not (isinstance(err, torch.distributed.DistError) or any(sign in text for sign in _CONNECTION_SIGNS)):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun must not end this process before it reports
        reason = next((sign for sign in reversed(_CONNECTION_SIGNS) if sign in text), type(err).__name__)
        raise ConnectionError(
            f"another of the {size} processes has ended or does not answer ({reason}), so this one stops; saved "
            "checkpoints are intact: resume with --resume"
        ) from err


_CONNECTION_SIGNS = (
    "gloo",
    "Gloo",
    "NCCL",
    "Broken pipe",
    "Connection reset",
    "Connection closed by peer",
    "Timed out waiting",
)
"""Parts of torch's messages for a failed collective; the most telling last."""


def check_single_process(world: World) -> None:
    """Raise ValueError if torchrun started several processes for a command that does not distribute its work."""
    if world.size == 1 and _variable("WORLD_SIZE", 1) > 1:
        raise ValueError(
            "only train and pipeline distribute their work over processes: run this command without torchrun"
        )
