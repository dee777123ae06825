"""Recognize and describe errors of memory, also under a limit of the address space (`ulimit -v`)."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from niels_gpt.system import allocator

_SIGNS = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "out of memory",
    "a primitive",  # oneDNN
    "annot allocate memory",  # the dynamic linker, and the system
    "failed to map segment",
)
_NEED = {"numpy": 300 << 20, "torch": 704 << 20}
"""Address space below which importing a package fails: the process then exits or aborts without a Python error."""
_ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.,]+) (bytes|[KMGT]iB)")


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":  # torch's; torch may not be loaded
        return True
    if isinstance(err, SystemError):  # CPython raises it when an allocation fails unnoticed
        return _limit() is not None
    return isinstance(err, RuntimeError | ImportError | OSError) and any(sign in str(err) for sign in _SIGNS)


def describe(err: BaseException) -> str:
    """Return an error of memory as one line: the allocation that failed, and the limit of this process."""
    if isinstance(err, TooLittle):
        return str(err)
    asked = _ASKED.search(str(err))
    size = "" if asked is None else f": cannot allocate {_short(asked[1], asked[2])} at once"
    return f"out of memory{size}{limit_text() or '; use a smaller model, batch or context, or close other programs'}"


def limit_text() -> str:
    """The limit of the address space and the remedy, to be appended to a message; empty if there is none."""
    limit = _limit()
    return "" if limit is None else f"; the limit of this process is {gib(limit)} (ulimit -v): raise it"


def address_space_left() -> int | None:
    """The bytes that this process may still map; None without a limit, or where the system does not tell."""
    limit = _limit()
    if limit is None:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return None
    return limit - pages * resource.getpagesize()


def machine_memory() -> int:
    """Bytes of memory of this machine, or the limit of this process (ulimit -v) if that is lower."""
    physical, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _limit()
    return physical if limit is None else min(physical, limit)


def gib(size: float) -> str:
    """A number of bytes as "1.50 GiB"."""
    return f"{size / 2**30:,.2f} GiB" if size < 2**40 else f"{int(size // 2**30):,} GiB"


def prepare_for_limit() -> None:
    """Under a limit of the address space: reserve little of it, and raise MemoryError if numpy or torch cannot load."""
    if _limit() is None:
        return
    allocator.share_one_arena()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's; a buffer per thread, reserved when it loads
    os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "64MiB")  # the allocator of torch on ARM reserves 1 GiB otherwise
    if not any(isinstance(finder, _Check) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Check())


class TooLittle(MemoryError):
    """A limit is too small for what is to come; the message names that, its need, the limit and the remedy."""


class _Check:
    """A finder that finds nothing: it sees the name of each module before it is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        limit, need = _limit(), _NEED.get(name)
        if limit is not None and need is not None and limit < need:
            raise TooLittle(f"{name} needs {gib(need)} of address space{limit_text()}")


def _limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _short(number: str, unit: str) -> str:
    return gib(float(number.replace(",", ""))) if unit == "bytes" else f"{number} {unit}"
