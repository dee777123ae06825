"""Where tensors live."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""torch for CUDA on Linux comes with it."""


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


def has_fast_bf16(device: str) -> bool:
    """Whether matrices are multiplied faster in bfloat16 than in float32 there: CUDA, or Intel AMX."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and torch.cpu._is_amx_tile_supported()


def _onednn_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def emulates_bf16(device: str) -> bool:
    """Whether torch does bfloat16 there number by number: right, but 270 times slower than float32 (Neoverse-N1)."""
    return torch.device(device).type == "cpu" and not _onednn_has_bf16()


@contextlib.contextmanager
def bf16_autocast(kind: str, wanted: bool = True, *, keep_casts: bool = True) -> Iterator[None]:
    """Products in bfloat16 on a kind of device, if wanted, for the block: autocast.

    On a CPU where oneDNN has no bfloat16, torch tries it once, warns with a page of addresses, and does without oneDNN
    for the rest of the process: then float32 is rounded otherwise too, and a resumed run differs in its last bits. So
    there oneDNN is put aside, for the block alone.
    """
    aside = wanted and emulates_bf16(kind)
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    if aside:
        onednn.enabled = False  # type: ignore[assignment]
    try:
        with torch.autocast(kind, torch.bfloat16, enabled=wanted, cache_enabled=keep_casts):
            yield
    finally:
        if aside:
            onednn.enabled = before


PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Products of bfloat16 matrices per second, dense, summed in float32, as the vendor says."""


def peak_flops(device: str) -> float | None:
    """What the device could do in bfloat16 at best, operations per second; None where that is not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = sorted((model for model in PEAK_FLOPS if model in name), key=len)
    return PEAK_FLOPS[known[-1]] if known else None


def check_precision(precision: str, device: str) -> None:
    """Raise ValueError where the device has no such arithmetic."""
    kind = torch.device(device).type
    if precision == "tf32" and kind != "cuda":
        raise ValueError(f"train.precision=tf32 is arithmetic of CUDA devices, not of {device}: use fp32 or bf16")
    if precision == "bf16" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"train.precision=bf16: {name} has no bfloat16 (it came with Ampere): use fp32")
    if precision == "fp8" and (kind != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        name = torch.cuda.get_device_name(device) if kind == "cuda" else device
        raise ValueError(f"train.precision=fp8: {name} has no FP8 products (they came with Ada and Hopper): use bf16")
    if precision == "fp8" and not HAS_TRITON:
        raise ValueError("train.precision=fp8 needs Triton, which torch for CUDA comes with on Linux: use bf16")
