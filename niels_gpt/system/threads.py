"""Threads under the limits of a process (`ulimit -v`, `ulimit -u`).

C++ code (SentencePiece, OpenMP) aborts the process if it cannot start a thread, and Python waits for ever for a thread
that cannot allocate its first bytes. So count what the limits allow before threads are started.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from pathlib import Path

from niels_gpt.system import allocator, memory

MARGIN = 48 << 20
"""Address space that must remain when all threads have been started."""
_DEFAULT_STACK = 8 << 20
_BESIDE_STACK = 2 << 20
"""Address space of a thread without its stack: the guard page, thread-local data, and what it first allocates."""
_SMALL_LIMIT = 4096
"""A larger limit of processes is not checked: counting those of the user takes long."""
_TORCH_THREAD = 8
"""Address space of a thread of torch, with its buffer for matmuls, in threads that only have a stack."""
_TORCH_RESERVE = 384 << 20
"""Address space that remains for what torch computes."""
_ARROW_THREADS = 2
"""One that computes, one that reads."""
_SIGNS = ("can't start new thread", "Resource temporarily unavailable")


def is_thread_error(err: BaseException) -> bool:
    """Whether an error means that a thread could not be started."""
    return isinstance(err, RuntimeError) and any(sign in str(err) for sign in _SIGNS)


def describe() -> str:
    """The error of a thread that could not be started, as one line: the limit of this process, and the remedy."""
    return f"cannot start another thread{_limit_text()}"


def check(number: int, what: str, *, reserve: int = MARGIN) -> None:
    """Raise MemoryError, with a message for the user, unless so many threads can be started and `reserve` remains."""
    if startable(number, reserve=reserve) < number:
        left = memory.address_space_left()
        space = "" if left is None else f" with {memory.gib(number * _size() + reserve)} of address space"
        rest = "" if left is None else f", and {memory.gib(max(left, 0))} are left"
        raise memory.TooLittle(f"{what} needs {number} threads{space}{rest}{_limit_text()}")


def startable(wanted: int, *, reserve: int = MARGIN) -> int:
    """How many of `wanted` threads the limits allow, if `reserve` bytes of address space are to remain; 0 for none."""
    return max(0, min(wanted, _by_address_space(wanted, reserve), _by_processes(wanted)))


def prepare_torch() -> None:
    """For programs that compute a model: `fit_torch`, and keep freed memory."""
    fit_torch()
    allocator.keep_freed_memory()


def fit_torch() -> None:
    """Lower the number of torch's threads to what the limits allow, with a warning; it must be imported."""
    torch = sys.modules["torch"]
    wanted = torch.get_num_threads()
    if wanted < 2:
        return
    fitting = 1 + startable((wanted - 1) * _TORCH_THREAD, reserve=_TORCH_RESERVE) // _TORCH_THREAD
    if fitting < wanted:
        torch.set_num_threads(fitting)
        warnings.warn(f"using {fitting} of {wanted} threads{_limit_text()}", stacklevel=2)


def leave_cores_to_other_threads() -> int:
    """Let torch compute in one thread here and in threads that start later; return how many threads it had.

    For a process whose model runs in a separate thread. OpenMP keeps the helpers of every thread that has computed with
    several, and lets all of them wait passively if they are more than the cores: decoding took 11 % longer.
    """
    import torch

    number = torch.get_num_threads()
    torch.set_num_threads(1)
    return number


def fit_datasets() -> None:
    """Under a limit of the address space, let `datasets` and pyarrow use few threads. Raises MemoryError if too many.

    pyarrow waits for ever for a thread of its pools that could not be started.
    """
    if memory.address_space_left() is None:
        return
    import pyarrow
    import tqdm  # type: ignore[import-untyped]  # of datasets

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars
    check(_ARROW_THREADS, "reading data")


def _by_address_space(wanted: int, reserve: int) -> int:
    left = memory.address_space_left()
    if left is None:
        return wanted
    allocator.share_one_arena()
    return (left - reserve) // _size()


def _by_processes(wanted: int) -> int:
    limit = _process_limit()
    return wanted if limit is None else limit - _threads_of_user()


def _size() -> int:
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return (_DEFAULT_STACK if stack == resource.RLIM_INFINITY else stack) + _BESIDE_STACK


def _process_limit() -> int | None:
    """The limit of processes and threads of this user; None if there is none or a large one, and for root."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit > _SMALL_LIMIT else limit


def _threads_of_user() -> int:
    user, total = os.getuid(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                total += len(os.listdir(folder / "task"))  # noqa: PTH208 (no Path object per thread)
        except OSError:  # it has ended
            continue
    return total


def _limit_text() -> str:
    limit = _process_limit()
    processes = "" if limit is None else f"; this user may have {limit:,} processes and threads (ulimit -u): raise it"
    return memory.limit_text() + processes or "; this user or container has too many: end other programs"
