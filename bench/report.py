"""Results for people and for programs: a table, and JSON with the facts of the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path

from rich.table import Table

from bench.runner import Row


def table(rows: Sequence[Row], *, quick: bool = False) -> Table:
    """Case, contender, median, unit, ratio, share of the peak, target; one line per row."""
    made = Table(title="tiny sizes: the numbers say only that it runs" if quick else None)
    made.add_column("case")
    made.add_column("contender")
    for right in ("median", "unit", "ratio", "of peak", "target"):
        made.add_column(right, justify="left" if right == "unit" else "right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row.case):
            made.add_section()
        value = "" if row.median is None else f"{row.median:,.0f}" if row.median >= 1000 else f"{row.median:.3g}"
        verdict = {True: " met", False: " missed", None: ""}[row.met]
        made.add_row(
            row.case if row.case != before else "",
            row.contender,
            row.error or value,
            row.unit if row.error is None else "",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            "" if row.peak_share is None else f"{row.peak_share:.0%}",
            row.target + verdict,
            style="bold" if row.role == "ours" else None,
        )
        before = row.case
    return made


def write_json(path: Path, rows: Sequence[Row], *, rounds: int, quick: bool) -> None:
    """Write everything that was measured, every round of it, to path; folders are made."""
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "quick": quick,
        "rounds": rounds,
        "machine": machine_facts(),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine_facts() -> dict[str, object]:
    """What the numbers depend on: processor, cores, load, versions (None where not installed)."""
    packages = ("niels-gpt", "torch", "numpy", "transformers", "litgpt")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
