"""Results as a table and as JSON, with the facts of the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

import niels_gpt
from bench.peers import version_of
from bench.runner import Row


def table(rows: Sequence[Row], *, quick: bool = False) -> Table:
    """Return a table of case, contender, median, unit, ratio and target; it fits in 80 columns."""
    title = "tiny sizes: the figures only show that everything runs" if quick else None
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("case", "contender", "median", "unit", "ratio", "target"):
        made.add_column(column, justify="right" if column in ("median", "ratio") else "left")
    for row, before in zip(rows, [None, *rows], strict=False):
        new = before is None or before.case != row.case
        if new:
            made.add_section()
        value = "" if row.median is None else number(row.median)
        verdict = {True: " met", False: " missed", None: ""}[row.met]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        unit, target = ("", escape(row.error)) if row.error else (row.unit, row.target + verdict)
        style = "bold" if row.role == "ours" else None
        made.add_row(row.case if new else "", row.contender, value, unit, ratio, target, style=style)
    return made


def number(value: float) -> str:
    """Return a number with as many digits as a reader needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def write_json(path: Path, rows: Sequence[Row], **about: object) -> None:
    """Write every round of every row, with the facts in `about`; creates folders."""
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    result = {"date": date, **about, "rows": list(map(asdict, rows))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def machine(device: str = "cpu") -> dict[str, object]:
    """Return what the figures depend on: processor, cores, GPU, load, versions (None if not installed).

    Raises ValueError for a device that this machine does not have.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **({} if device == "cpu" else _gpu(device)),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "niels-gpt": niels_gpt.__version__,
        **{name: version_of(name) for name in ("torch", "numpy", "transformers", "trl", "litgpt", "llama_cpp")},
    }


def _gpu(device: str) -> dict[str, object]:
    import torch

    from niels_gpt.system.device import resolve_device

    found = torch.cuda.get_device_properties(resolve_device(device))
    return {"gpu": found.name, "gpu GiB": round(found.total_memory / 2**30), "cuda": torch.version.cuda}
