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
    facts = {
        **doctor_facts(device),
        "computed_by": computed_by(device),
        "backends": [row._asdict() for row in rows],
    }
    facts["missing"] = missing(rows)
    if json:
        print(dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_facts(facts, rows)


def doctor_facts(device: str) -> dict[str, Any]:
    """Return `machine_facts` with the precisions of `device`, the compiler and the folders of compiled kernels."""
    from niels_gpt.system.machine import machine_facts

    return {
        **machine_facts(device),
        "precision": {name: precision_support(name, device) for name in PRECISIONS},
        "compiler": find_compiler(),
        "kernel_folders": kernel_folders(),
    }


def computed_by(device: str) -> dict[str, str]:
    """Return the name of the backend that trains a model in each precision on `device`, and why it is "plain"."""
    from niels_gpt.model import gpt, lora  # noqa: F401  (so that edits of them are found)
    from niels_gpt.model.backend import choose, name_of, why_plain

    reason = why_plain()
    if reason:
        return {"all": f"plain ({reason})"}
    return {
        name: name_of(choose(device, precision=name))
        for name in PRECISIONS
        if not precision_support(name, device).startswith("no")
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
    from niels_gpt.system.machine import package_version

    switched_off = os.environ.get(native.VARIABLE) == "0"
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path("~/.triton/cache").expanduser())
    return {
        "C": None if switched_off else str(native.kernel_folder()),
        "Triton": triton if package_version("triton") else None,
    }


def missing(rows: Sequence[BackendRow]) -> list[str]:
    """Return why backends are not used, or not at full speed, and the remedies: one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            by_reason.setdefault(row.reason, []).append(row.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


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
        "computed by": ", ".join(f"{precision}: {name}" for precision, name in facts["computed_by"].items()),
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
