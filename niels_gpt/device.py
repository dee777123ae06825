"""Where tensors live."""

from __future__ import annotations

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
