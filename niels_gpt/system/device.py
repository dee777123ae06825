"""Devices: which one to use, and which precisions it supports."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed; torch for CUDA on Linux includes it."""


def get_device() -> str:
    """Return "mps" on Apple Silicon, otherwise "cpu"."""
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resolve_device(name: str = "auto") -> str:
    """Return the device for a command's `--device`; `auto` is cuda if available, otherwise `get_device()`.

    Raises ValueError for a device that this machine does not have.
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
        present = ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in available.items() if n)
        raise ValueError(f"--device {name}: this machine has no such device; it has {present}")
    return name


def has_fast_bf16(device: str) -> bool:
    """Whether matmuls on the device are faster in bfloat16 than in float32: CUDA, or a CPU with Intel AMX."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and torch.cpu._is_amx_tile_supported()


def _onednn_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def emulates_bf16(device: str) -> bool:
    """Whether torch emulates bfloat16 on the device: correct, but 270 times slower than float32 (Neoverse-N1)."""
    return torch.device(device).type == "cpu" and not _onednn_has_bf16()


@contextlib.contextmanager
def bf16_autocast(kind: str, wanted: bool = True, *, keep_casts: bool = True) -> Iterator[None]:
    """Run the block under bfloat16 autocast on a type of device, if `wanted`.

    On a CPU where oneDNN has no bfloat16, torch tries it once, prints a long warning, and disables oneDNN for the rest
    of the process. Float32 results then round differently, and a resumed run differs in its last bits. Therefore oneDNN
    is disabled here for the block only.
    """
    disable_onednn = wanted and emulates_bf16(kind)
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    if disable_onednn:
        onednn.enabled = False  # type: ignore[assignment]
    try:
        with torch.autocast(kind, torch.bfloat16, enabled=wanted, cache_enabled=keep_casts):
            yield
    finally:
        if disable_onednn:
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
"""Peak bfloat16 FLOP/s of dense matmuls with float32 accumulation, from the vendors' data sheets."""


def peak_flops(device: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of the device; None if unknown."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = sorted((model for model in PEAK_FLOPS if model in name), key=len)
    return PEAK_FLOPS[known[-1]] if known else None


def check_precision(precision: str, device: str) -> None:
    """Raise ValueError if the device does not support the precision."""
    kind = torch.device(device).type
    if precision == "tf32" and kind != "cuda":
        raise ValueError(f"train.precision=tf32 needs a CUDA device, not {device}: use fp32 or bf16")
    if precision == "bf16" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"train.precision=bf16: {name} does not support bfloat16 (Ampere and later do): use fp32")
    if precision == "fp8" and (kind != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        name = torch.cuda.get_device_name(device) if kind == "cuda" else device
        raise ValueError(f"train.precision=fp8: {name} has no FP8 matmuls (Ada, Hopper and later do): use bf16")
    if precision == "fp8" and not HAS_TRITON:
        raise ValueError("train.precision=fp8 needs Triton, which torch for CUDA on Linux includes: use bf16")
