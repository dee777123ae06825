"""This machine and the software on it: processor, GPUs, cores, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def machine_facts(device: str) -> dict[str, Any]:
    """Return versions, devices, and the cores and threads of this process; `device` is the one in use."""
    import torch

    from niels_gpt import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "niels_gpt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "device": device,
        "devices": devices(),
        "cores": cores,
        "threads": torch.get_num_threads(),
    }


def devices() -> list[str]:
    """Return the processor and every GPU, in words."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = [f"cpu: {models[0] if models else platform.processor() or platform.machine()}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        found.append(f"cuda:{index}: {properties.name}, {memory:.0f} GiB, compute capability {capability}")
    if torch.backends.mps.is_available():
        found.append("mps: Apple GPU")
    return found


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
