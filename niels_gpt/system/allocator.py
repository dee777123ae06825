"""Settings of the C allocator for large arrays and tensors on the CPU."""

from __future__ import annotations

import functools
import sys


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep freed blocks, once per process; does nothing with other C libraries.

    By default glibc allocates every tensor over 32 MB with a new mmap, whose pages the kernel zeroes at each step. At
    v0 and B=32 the MLP's activations have that size: a GELU over them takes 11 ms with new pages and 3 ms without; a
    batch of splice frames takes 0.6 ms and 0.14 ms. The cost: resident memory stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):  # musl and others have no mallopt; only speed is lost
        return


@functools.cache
def share_one_arena() -> None:
    """Make all threads allocate from one arena, once per process; does nothing with other C libraries.

    glibc reserves 64 to 128 MB of address space for each arena, and has up to 8 arenas per core: too much under a
    limit of the address space.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    try:
        m_arena_max = -8
        ctypes.CDLL("libc.so.6").mallopt(m_arena_max, 1)
    except (OSError, AttributeError):  # musl and others have no arenas
        return
