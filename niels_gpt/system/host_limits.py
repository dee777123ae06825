"""What this machine and the limits of this process allow: memory (`ulimit -v`), threads (`ulimit -u`), open files.

C++ code (SentencePiece, OpenMP) aborts the process if it cannot start a thread, and Python waits for ever for a thread
that cannot allocate its first bytes. So count what the limits allow before threads are started. numpy and torch end the
process if they cannot load. A mapped shard of a token cache stays open, so a cache of a thousand shards needs more than
the usual 1,024 open files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

MARGIN = 48 << 20
"""Address space that must remain when all threads have been started."""
_MEMORY_SIGNS = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "out of memory",
    "a primitive",  # oneDNN
    "annot allocate memory",  # the dynamic linker, and the system
    "failed to map segment",
)
_THREAD_SIGNS = ("can't start new thread", "Resource temporarily unavailable")
_NEED = {"numpy": 300 << 20, "torch": 704 << 20}
"""Address space below which importing a package fails: the process then exits or aborts without a Python error."""
_ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.,]+) (bytes|[KMGT]iB)")
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
_WANTED_FILES = 65_536
_NEEDED_FILES = 256
"""What a command needs without mapped shards, with room to spare."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Options of glibc's `mallopt`."""


class TooLittle(MemoryError):
    """A limit is too small for what is to come; the message names that, its need, the limit and the remedy."""


def prepare_process() -> None:
    """Use what the limits allow: many open files, and under a limit of the address space little of that.

    numpy and torch then raise MemoryError if they cannot load.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:  # raising it to the hard limit needs no privileges
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if _address_space() is None:
        return
    share_one_arena()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's; a buffer per thread, reserved when it loads
    os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "64MiB")  # the allocator of torch on ARM reserves 1 GiB otherwise
    if not any(isinstance(finder, _Check) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Check())


class _Check:
    """A finder that finds nothing: it sees the name of each module before it is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        limit, need = _address_space(), _NEED.get(name)
        if limit is not None and need is not None and limit < need:
            raise TooLittle(f"{name} needs {gib(need)} of address space{memory_limit_text()}")


# --- errors ------------------------------------------------------------------------------------------


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":  # torch's; torch may not be loaded
        return True
    if isinstance(err, SystemError):  # CPython raises it when an allocation fails unnoticed
        return _address_space() is not None
    return isinstance(err, RuntimeError | ImportError | OSError) and any(sign in str(err) for sign in _MEMORY_SIGNS)


def is_thread_error(err: BaseException) -> bool:
    """Whether an error means that a thread could not be started."""
    return isinstance(err, RuntimeError) and any(sign in str(err) for sign in _THREAD_SIGNS)


def describe_limit_error(err: BaseException) -> str | None:
    """Return an error of memory or threads as one line, with the limit of this process; None for any other error."""
    if isinstance(err, TooLittle):
        return str(err)
    if is_out_of_memory(err):
        asked = _ASKED.search(str(err))
        size = "" if asked is None else f": cannot allocate {_short(asked[1], asked[2])} at once"
        remedy = "; use a smaller model, batch or context, or close other programs"
        return f"out of memory{size}{memory_limit_text() or remedy}"
    if is_thread_error(err):
        return f"cannot start another thread{_thread_limit_text()}"
    return None


def open_files_remedy(err: OSError) -> str:
    """What to do about too many open files, to be appended to the message; empty for any other error."""
    if err.errno == errno.ENFILE:
        return ": the limit of the whole system (sysctl fs.file-max) is reached; close other programs"
    if err.errno != errno.EMFILE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = f"at least {_NEEDED_FILES}" if limit < _NEEDED_FILES else f"more, e.g. {4 * limit:,}"
    return f": this process may open {limit:,} files (ulimit -n) and needs {need}, one per shard of a cache; raise it"


def memory_limit_text() -> str:
    """The limit of the address space and the remedy, to be appended to a message; empty if there is none."""
    limit = _address_space()
    return "" if limit is None else f"; the limit of this process is {gib(limit)} (ulimit -v): raise it"


def _thread_limit_text() -> str:
    limit = _process_limit()
    processes = "" if limit is None else f"; this user may have {limit:,} processes and threads (ulimit -u): raise it"
    return memory_limit_text() + processes or "; this user or container has too many: end other programs"


# --- memory ------------------------------------------------------------------------------------------


def machine_memory() -> int:
    """Bytes of memory of this machine, or the limit of this process (ulimit -v) if that is lower."""
    physical, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _address_space()
    return physical if limit is None else min(physical, limit)


def gib(size: float) -> str:
    """A number of bytes as "1.50 GiB"."""
    return f"{size / 2**30:,.2f} GiB" if size < 2**40 else f"{int(size // 2**30):,} GiB"


def _short(number: str, unit: str) -> str:
    return gib(float(number.replace(",", ""))) if unit == "bytes" else f"{number} {unit}"


def _address_space() -> int | None:
    """The limit of the address space."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space_left() -> int | None:
    """The bytes that this process may still map; None without a limit, or where the system does not tell."""
    limit = _address_space()
    if limit is None:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return None
    return limit - pages * resource.getpagesize()


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep freed blocks, once per process; does nothing with other C libraries.

    By default glibc allocates every tensor over 32 MB with a new mmap, whose pages the kernel zeroes at each step. At
    v0 and B=32 the MLP's activations have that size: a GELU over them takes 11 ms with new pages and 3 ms without; a
    batch of splice frames takes 0.6 ms and 0.14 ms. The cost: resident memory stays at its peak.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: 2**31 - 1})


@functools.cache
def share_one_arena() -> None:
    """Make all threads allocate from one arena, once per process; does nothing with other C libraries.

    glibc reserves 64 to 128 MB of address space for each arena, and has up to 8 arenas per core: too much under a
    limit of the address space.
    """
    _set_malloc({_M_ARENA_MAX: 1})


def _set_malloc(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # musl and others have no mallopt
        libc = ctypes.CDLL("libc.so.6")
        for option, value in options.items():
            libc.mallopt(option, value)


# --- threads -----------------------------------------------------------------------------------------


def check_threads(number: int, what: str, *, reserve: int = MARGIN) -> None:
    """Raise MemoryError, with a message for the user, unless so many threads can be started and `reserve` remains."""
    if startable(number, reserve=reserve) < number:
        left = _address_space_left()
        space = "" if left is None else f" with {gib(number * _thread_size() + reserve)} of address space"
        rest = "" if left is None else f", and {gib(max(left, 0))} are left"
        raise TooLittle(f"{what} needs {number} threads{space}{rest}{_thread_limit_text()}")


def startable(wanted: int, *, reserve: int = MARGIN) -> int:
    """How many of `wanted` threads the limits allow, if `reserve` bytes of address space are to remain; 0 for none."""
    left, processes = _address_space_left(), _process_limit()
    if left is not None:
        share_one_arena()
        wanted = min(wanted, (left - reserve) // _thread_size())
    if processes is not None:
        wanted = min(wanted, processes - _threads_of_user())
    return max(0, wanted)


def prepare_torch() -> None:
    """For programs that compute a model: `fit_torch`, and keep freed memory."""
    fit_torch()
    keep_freed_memory()


def fit_torch() -> None:
    """Lower the number of torch's threads to what the limits allow, with a warning; it must be imported."""
    torch = sys.modules["torch"]
    wanted = torch.get_num_threads()
    if wanted < 2:
        return
    fitting = 1 + startable((wanted - 1) * _TORCH_THREAD, reserve=_TORCH_RESERVE) // _TORCH_THREAD
    if fitting < wanted:
        torch.set_num_threads(fitting)
        warnings.warn(f"using {fitting} of {wanted} threads{_thread_limit_text()}", stacklevel=2)


def fit_datasets() -> None:
    """Under a limit of the address space, let `datasets` and pyarrow use few threads. Raises MemoryError if too many.

    pyarrow waits for ever for a thread of its pools that could not be started.
    """
    if _address_space_left() is None:
        return
    import pyarrow
    import tqdm  # type: ignore[import-untyped]  # of datasets

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars
    check_threads(_ARROW_THREADS, "reading data")


def _thread_size() -> int:
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
