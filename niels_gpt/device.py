"""Where tensors live, and how the C allocator serves the ones on the CPU."""

from __future__ import annotations

import functools
import sys

import torch


def get_device() -> str:
    """ "mps" on Apple Silicon, else "cpu"."""
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resolve_device(name: str = "auto") -> str:
    """The device for a command's `--device`: auto is cuda if there is one, then `get_device()`.

    Raises ValueError for a device this machine does not have.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else get_device()
    try:
        wanted = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is not a device: use auto, cpu, cuda or mps") from None
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if (wanted.index or 0) >= available.get(wanted.type, 0):
        here = ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in available.items() if n)
        raise ValueError(f"--device {name}: this machine has no such device; it has {here}")
    return name


def multiplies_bf16(device: str) -> bool:
    """Whether matrices are multiplied faster in bfloat16 than in float32 there: CUDA, or Intel AMX."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and torch.cpu._is_amx_tile_supported()


@functools.cache
def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks, once per process; does nothing elsewhere.

    By default every tensor over 32 MB is a fresh mmap, whose pages the kernel zeroes again at each
    step: at v0 and B=32 the MLP's activations are of that size, and a GELU over them takes 11 ms
    with fresh pages and 3 ms without. The price: resident memory stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):  # musl and others: no mallopt, nothing lost but speed
        return
