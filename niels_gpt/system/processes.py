"""The processes of a run: one, or as many as torchrun has started.

Every process holds the whole plan of a step and learns from its own share of the rows. What they have to agree on (a
signal, a folder, an error in the set-up) goes over a group of its own on the CPU: it waits as long as it takes, and a
process that dies closes its connections, so that the others know at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from niels_gpt.system.device import resolve_device

TIMEOUT = timedelta(minutes=15)
"""For the processes to find each other, and for any one exchange of gradients or weights."""
PATIENCE = timedelta(days=7)
"""For what one process does while the others wait: reading data, writing a checkpoint."""

T = TypeVar("T")


class RankShare(NamedTuple):
    """Part `rank` of `size` of what is split over processes; by default the whole."""

    rank: int = 0
    size: int = 1

    def of(self, number: int) -> slice:
        """Which of so many things, in order: parts follow each other and differ by at most one."""
        return slice(self.rank * number // self.size, (self.rank + 1) * number // self.size)


ALL_ROWS = RankShare()
"""All of it."""


@dataclass(frozen=True)
class World:
    """One process among `size`. Alone, nothing here does any work."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Its own."""
    restarts: int = 0
    """How many times torchrun has started all processes again."""
    control: Any = field(default=None, repr=False)
    """The group for what is agreed on; None alone."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def share(self) -> RankShare:
        """Its rows of anything that is split."""
        return RankShare(self.rank, self.size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, in its place; on a GPU nothing waits for it."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def total(self, *numbers: float | np.ndarray) -> list[np.ndarray]:
        """The sums of numbers or arrays over all processes, in float64."""
        arrays = [np.asarray(number, dtype=np.float64) for number in numbers]
        if self.size == 1:
            return arrays
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        torch.distributed.all_reduce(flat, group=self.control)
        parts = np.split(flat.numpy(), np.cumsum([array.size for array in arrays])[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def highest(self, number: int) -> int:
        """The highest of the numbers that the processes give."""
        if self.size == 1:
            return number
        held = torch.tensor(number)
        torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX, group=self.control)
        return int(held)

    def gather(self, value: T) -> list[T]:
        """The small values of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self.control)
        return found

    def broadcast(self, value: T) -> T:
        """The small value of the main process."""
        if self.size == 1:
            return value
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            torch.distributed.barrier(group=self.control)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes get through, or none. It must not exchange anything itself.

        If it fails somewhere, the first process that failed raises its error, and the others exit without a word.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as err:
            problem = err
            if self.size == 1:
                raise
        failed = [rank for rank, bad in enumerate(self.gather(problem is not None)) if bad]
        if failed and failed[0] == self.rank and problem is not None:
            raise problem
        if failed:
            sys.exit(1)

    def in_turn(self, make: Callable[[], T]) -> T:
        """What `make` gives, which the main process makes first: what it leaves on disk the others only read."""
        made: list[T] = []
        for turn in (self.is_main, not self.is_main):
            with self.together():
                if turn:
                    made.append(make())
        return made[0]


SINGLE_PROCESS = World()
"""A run in one process."""


@contextlib.contextmanager
def open_world(device: str = "auto") -> Iterator[World]:
    """The world that torchrun's environment variables describe, on the device asked for; alone without them.

    Raises ValueError for a device that several processes cannot use, ConnectionError where they do not find each other
    or one of them is lost. Errors of other processes than the main one say whose they are.
    """
    size, restarts = _variable("WORLD_SIZE", 1), _variable("TORCHELASTIC_RESTART_COUNT", 0)
    if size == 1:
        yield World(device=resolve_device(device), restarts=restarts)
        return
    rank, local = _variable("RANK"), _variable("LOCAL_RANK")
    try:
        own = device_of_rank(resolve_device(device), local)
        with _lost(size):
            control = _connect(own, rank, size, restarts)
            yield World(rank, size, own, restarts, control)
    except SystemExit:  # all end here, by agreement
        _leave()
        raise
    except (ValueError, OSError, ArithmeticError) as err:  # the others may wait for this one: it ends as it is
        if rank == 0:
            raise
        raise ValueError(f"rank {rank}: {err}") from err
    _leave()


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _variable(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise ValueError(f"WORLD_SIZE is set, but not {name}: start several processes with torchrun")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a number, got {text!r}") from None


def device_of_rank(device: str, local_rank: int) -> str:
    """The device of a process: one GPU each, or the CPU for all. Raises ValueError where that cannot be."""
    kind, _, index = device.partition(":")
    if index or kind not in ("cpu", "cuda"):
        raise ValueError(f"several processes run on --device cuda (one GPU each) or --device cpu, not on {device}")
    if kind == "cpu":
        return device
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise ValueError(
            f"process {local_rank} of this machine has no GPU: there are {there}; --nproc-per-node={there}"
        )
    return f"cuda:{local_rank}"


def _connect(device: str, rank: int, size: int, restarts: int) -> Any:
    """Join the other processes; the group for what is agreed on."""
    cuda = torch.device(device) if device != "cpu" else None
    if cuda is not None:
        torch.cuda.set_device(cuda)
    store, *_ = next(torch.distributed.rendezvous("env://", rank, size, timeout=TIMEOUT))
    # torchrun may keep its store when it starts all again, with the addresses of those that are gone.
    store = torch.distributed.PrefixStore(f"start {restarts}", store)
    backend = "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=cuda
    )
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


@contextlib.contextmanager
def _lost(size: int) -> Iterator[None]:
    """Raise ConnectionError for what torch says when another process does not answer."""
    try:
        yield
    except RuntimeError as err:
        text = str(err)
        if not (isinstance(err, torch.distributed.DistError) or any(sign in text for sign in _SIGNS)):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself now; torchrun shall not cut it short
        reason = next((sign for sign in reversed(_SIGNS) if sign in text), type(err).__name__)
        raise ConnectionError(
            f"another of the {size} processes has ended or does not answer ({reason}), so this one stops; what has "
            "been saved is intact, and the run goes on with --resume"
        ) from err


_SIGNS = ("gloo", "Gloo", "NCCL", "Broken pipe", "Connection reset", "Connection closed by peer", "Timed out waiting")
"""Of an exchange that failed, in torch's words; the plainest last."""


def check_single_process(world: World) -> None:
    """Raise ValueError where torchrun has started several processes for a command that each would do by itself."""
    if world.size == 1 and _variable("WORLD_SIZE", 1) > 1:
        raise ValueError("only niels-gpt train and pipeline share their work out over processes: start this one alone")
