"""Run a case: start its contenders, let them take turns, compare what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from bench.case import Case, Contender, load_case

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Row:
    """One line of the result."""

    case: str
    contender: str
    role: str
    unit: str
    median: float | None = None
    ratio: float | None = None
    """How many times as fast as `versus`: the median of the rounds' ratios."""
    versus: str | None = None
    """The fastest peer of the group."""
    target: str = ""
    met: bool | None = None
    error: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One per round."""


def start(case: str, contender: str, *, quick: bool) -> subprocess.Popen[str]:
    """The process of a contender, which warms up and then waits for requests; as a context it ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.worker", case, contender, *(["--quick"] if quick else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing a worker says; an "error" where it has died."""
    line = process.stdout.readline() if process.stdout else ""
    said: dict[str, Any] = json.loads(line) if line else {"error": f"failed: exit code {process.wait()}"}
    return said


def run_case(name: str, *, rounds: int, quick: bool, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """The rows of a case. Each contender does a round, then each the next: A B C A B C ..."""
    case = load_case(name)
    with contextlib.ExitStack() as stack:
        workers, measured = {}, {}
        for contender in (c.name for c in case.contenders):
            say(f"{case.name}: starting {contender}")
            workers[contender] = stack.enter_context(start(name, contender, quick=quick))
            measured[contender] = {**hear(workers[contender]), "seconds": []}
        for number in range(1, rounds + 1):
            for contender, mine in measured.items():
                if "error" in mine:
                    continue
                say(f"{case.name}: round {number} of {rounds}, {contender}")
                with contextlib.suppress(BrokenPipeError):  # then it has died, as hear will find
                    print("go", file=workers[contender].stdin, flush=True)
                said = hear(workers[contender])
                mine["seconds"].append(said.pop("seconds", None))
                mine.update(said)
    return summarise(case, measured)


def summarise(case: Case, measured: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row per contender, in the order of the case, and one more in % of the peak.

    `measured` has per contender what its worker said first, and "seconds", one per round. A contender with
    an "error" has only that in its row, and is nobody's fastest peer.
    """
    good = [c for c in case.contenders if "error" not in measured[c.name]]
    costs = {c.name: _costs(c, measured) for c in good}
    speeds = {c.name: (measured[c.name].get("gflop") or 0) / min(measured[c.name]["seconds"]) for c in good}
    peak = max((speeds[c.name] for c in good if c.role == "peak"), default=None)
    rows = []
    for c in case.contenders:
        mine = measured[c.name]
        row = Row(case.name, c.name, c.role, case.unit, facts=mine.get("facts", {}), error=mine.get("error"))
        rows.append(row)
        if row.error:
            continue
        row.seconds = mine["seconds"]
        if c.role == "peak":
            row.unit, row.median = "GFLOP/s", speeds[c.name]
            continue
        row.median = 1000 * median(costs[c.name]) if case.unit == "ms" else median(1 / s for s in costs[c.name])
        peers = [peer.name for peer in case.contenders if peer.role == "peer" and peer.group == c.group]
        if fit := [name for name in peers if name in costs]:
            row.versus = min(fit, key=lambda name: median(costs[name]))
            row.ratio = median(map(truediv, costs[row.versus], costs[c.name]))
        if c.target is not None and peers:
            row.target, row.met = f"≥ {c.target:g}x", None if row.ratio is None else row.ratio >= c.target
        elif c.target is not None:
            row.target, row.met = f"≤ {c.target:g} {case.unit}", row.median <= c.target
        if peak and mine.get("gflop"):
            share = 100 * mine["gflop"] / median(mine["seconds"]) / peak
            rows.append(Row(case.name, c.name, c.role, "% of peak", share))
    return rows


def _costs(contender: Contender, measured: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Seconds per unit of work, one per round."""
    mine = measured[contender.name]
    less = measured[contender.minus]["seconds"] if contender.minus else [0.0] * len(mine["seconds"])
    return [(s - subtracted) / mine["amount"] for s, subtracted in zip(mine["seconds"], less, strict=True)]
