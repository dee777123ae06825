"""`niels-gpt doctor`: what this machine can run, which backend is used for what, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.cli.options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from niels_gpt.model.backend import BackendRow

PRECISIONS = ("fp32", "tf32", "bf16", "fp8")


def doctor(device: DeviceOption = "auto", json: JsonOption = False) -> None:
    """Show what this machine can run, and what is missing.

    Versions, devices, precisions, threads, compiler and backends, and how to get what is missing.
    """
    from json import dumps

    from niels_gpt.model.backend import backend_report
    from niels_gpt.system.device import resolve_device

    device = resolve_device(device)
    rows = backend_report(device)
    facts = {**machine_facts(device), "backends": [row._asdict() for row in rows]}
    facts["missing"] = missing(rows)
    if json:
        print(dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_facts(facts, rows)


def machine_facts(device: str) -> dict[str, Any]:
    """Return versions, devices, precisions of `device`, threads, compiler, Triton and folders of compiled kernels."""
    import os
    import platform

    import torch

    from niels_gpt import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "niels_gpt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "device": device,
        "devices": _devices(),
        "precision": {name: precision_support(name, device) for name in PRECISIONS},
        "cores": cores,
        "threads": torch.get_num_threads(),
        "compiler": find_compiler(),
        "kernel_folders": kernel_folders(),
    }


def precision_support(precision: str, device: str) -> str:
    """Return "fast", "yes", "emulated (slow)", or "no: REASON" for training in a precision on a device."""
    from niels_gpt.system.device import check_precision, emulates_bf16, has_fast_bf16

    try:
        check_precision(precision, device)
    except ValueError as err:
        return f"no: {err}"
    if precision == "bf16":
        return "fast" if has_fast_bf16(device) else "emulated (slow)" if emulates_bf16(device) else "yes"
    return "yes"


def find_compiler() -> str | None:
    """Return the path of the C compiler for CPU kernels; None if there is none."""
    import shutil

    from niels_gpt.kernels.cpu import native

    command = native.find_compiler()
    return shutil.which(command[0]) if command else None


def kernel_folders() -> dict[str, str | None]:
    """Return where compiled kernels are kept, by kind; None where compiling is switched off."""
    import os

    from niels_gpt.kernels.cpu import native

    switched_off = os.environ.get(native.VARIABLE) == "0"
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path("~/.triton/cache").expanduser())
    return {
        "C": None if switched_off else str(native.kernel_folder()),
        "Triton": triton if _version("triton") else None,
    }


def missing(rows: Sequence[BackendRow]) -> list[str]:
    """Return why backends are not used, or not at full speed, and the remedies: one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            by_reason.setdefault(row.reason, []).append(row.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _devices() -> list[str]:
    """Return the processor and every GPU, in words."""
    import platform

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


def _version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print_facts(facts: dict[str, Any], rows: Sequence[BackendRow]) -> None:
    from rich.table import Table

    from niels_gpt.cli.tables import show_table

    folders = "  ".join(f"{kind}: {folder or 'none'}" for kind, folder in facts["kernel_folders"].items())
    lines = {
        "niels-gpt": facts["niels_gpt"],
        "Python": f"{facts['python']} on {facts['system']}",
        "torch": f"{facts['torch']}, CUDA {facts['cuda'] or 'none'}, Triton {facts['triton'] or 'none'}",
        "devices": "\n".join(facts["devices"]),
        "used": facts["device"],
        "precision": "\n".join(f"{name}: {support}" for name, support in facts["precision"].items()),
        "threads": f"{facts['threads']} of {facts['cores']} cores",
        "C compiler": facts["compiler"] or "none",
        "kernels in": folders,
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in lines.items():
        table.add_row(name, text)
    show_table(table)

    print(f"\nbackends on {facts['device']}")
    table = Table(box=None, pad_edge=False)
    for name in ("backend", "available", "used for", "supports", "declines"):
        table.add_column(name, overflow="fold")
    for row in rows:
        declines = "\n".join(f"{option}: {reason}" for option, reason in row.declines.items())
        available = "yes" if row.available else "no"
        table.add_row(row.name, available, row.used_for, ", ".join(row.supports), declines)
    show_table(table)
    print("\nmissing: nothing" if not facts["missing"] else "\nmissing")
    for line in facts["missing"]:
        print(f"  {line}")
