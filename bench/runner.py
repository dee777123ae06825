"""Run a case: start its contenders, let them take turns, compare what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from bench.case import HIGHER, Case, Contender, load_case

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
    """How many times as good as `versus` (as fast, as small): the median of the rounds' ratios."""
    versus: str | None = None
    """The best peer of the group."""
    target: str = ""
    met: bool | None = None
    error: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One per round, where the median is made of them."""
    values: list[float] = field(default_factory=list)
    """One per round in the unit, where a round measured it."""
    group: str = ""


def start(case: str, contender: str, *, device: str, quick: bool) -> subprocess.Popen[str]:
    """The process of a contender, which warms up and then waits for requests; as a context it ends."""
    usual = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # several compile at the same time
    return subprocess.Popen(
        [sys.executable, "-m", "bench.worker", case, contender, device, *(["--quick"] if quick else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
        env={**usual, **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing a worker says; an "error" where it has died."""
    line = process.stdout.readline() if process.stdout else ""
    said: dict[str, Any] = json.loads(line) if line else {"error": f"failed: exit code {process.wait()}"}
    return said


def run_case(
    name: str,
    *,
    rounds: int | None = None,
    quick: bool,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """The rows of a case. Each contender does a round, then each the next: A B C A B C ..."""
    case = load_case(name, device)
    rounds = rounds or (min(2, case.rounds) if quick else case.rounds)
    measured: dict[str, dict[str, Any]] = {c.name: {"seconds": [], "also": {}} for c in case.contenders}
    for first, last in [(n, n) for n in range(1, rounds + 1)] if case.fresh else [(1, rounds)]:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(case.starts) as pool:

            def begin(contender: str, stack: contextlib.ExitStack = stack) -> subprocess.Popen[str]:
                say(f"{case.name}: starting {contender}")
                worker = stack.enter_context(start(name, contender, device=device, quick=quick))
                measured[contender] |= hear(worker)
                return worker

            good = [contender for contender, mine in measured.items() if "error" not in mine]
            workers = dict(zip(good, pool.map(begin, good), strict=True))
            for number in range(first, last + 1):
                for contender, worker in workers.items():
                    if "error" not in measured[contender]:
                        say(f"{case.name}: round {number} of {rounds}, {contender}")
                        _round(worker, measured[contender])
    return summarise(case, measured)


def _round(worker: subprocess.Popen[str], mine: dict[str, Any]) -> None:
    """Ask for a round, and add what it gave."""
    with contextlib.suppress(BrokenPipeError):  # then it has died, as hear will find
        print("go", file=worker.stdin, flush=True)
    said = hear(worker)
    if "error" in said:
        mine["error"] = said["error"]
        return
    mine["seconds"].append(said.pop("seconds"))
    for unit, value in said.items():
        mine["also"].setdefault(unit, []).append(value)


def summarise(case: Case, measured: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row per contender, in the order of the case, and further ones: of what else it measured, in % of the peak.

    `measured` has per contender what its worker said first, "seconds", one per round, and "also", unit -> one value
    per round. A contender with an "error" has only that in its row, and is nobody's best peer.
    """
    good = [c for c in case.contenders if "error" not in measured[c.name]]
    costs = {c.name: _costs(c, measured) for c in good}
    also = {c.name: dict(measured[c.name].get("also", {})) for c in good}
    for c in good:
        if c.alone in costs:
            also[c.name]["x alone"] = list(map(truediv, costs[c.alone], costs[c.name]))
    speeds = {c.name: (measured[c.name].get("gflop") or 0) / min(measured[c.name]["seconds"]) for c in good}
    peak = max((speeds[c.name] for c in good if c.role == "peak"), default=None)
    rows = []
    for c in case.contenders:
        mine = measured[c.name]
        first = Row(case.name, c.name, c.role, case.unit, facts=mine.get("facts", {}), error=mine.get("error"))
        first.group = c.group
        rows.append(first)
        if first.error:
            continue
        if c.role == "peak":
            first.unit, first.median, first.seconds = "GFLOP/s", speeds[c.name], mine["seconds"]
            continue
        peers = [peer.name for peer in case.contenders if peer.role == "peer" and peer.group == c.group]
        if case.unit in also[c.name]:
            _fill(first, c, also, peers)
        else:
            first.seconds = mine["seconds"]
            _compare(first, c, costs, peers)
            in_ms = case.unit == "ms"
            first.median = 1000 * median(costs[c.name]) if in_ms else median(1 / s for s in costs[c.name])
        _judge(first, _goal(case, c, peers))
        if peak and mine.get("gflop"):
            share = 100 * mine["gflop"] / median(mine["seconds"]) / peak
            rows.append(Row(case.name, c.name, c.role, "% of peak", share, group=c.group))
        for unit in (unit for unit in also[c.name] if unit != case.unit):
            rows.append(Row(case.name, c.name, c.role, unit, group=c.group))
            _fill(rows[-1], c, also, peers)
            _judge(rows[-1], c.goals.get(unit, ""))
    return rows


def _costs(contender: Contender, measured: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Seconds per unit of work, one per round."""
    mine = measured[contender.name]
    less = measured[contender.minus]["seconds"] if contender.minus else [0.0] * len(mine["seconds"])
    return [(s - subtracted) / mine["amount"] for s, subtracted in zip(mine["seconds"], less, strict=True)]


def _fill(row: Row, contender: Contender, also: Mapping[str, Mapping[str, list[float]]], peers: list[str]) -> None:
    """Median and ratio of what the rounds measured in the row's unit."""
    row.values = also[contender.name][row.unit]
    row.median = median(row.values)
    costs = {name: found[row.unit] for name, found in also.items() if row.unit in found}
    if all(min(values) > 0 for values in costs.values()):  # a ratio to nothing says nothing
        if row.unit in HIGHER:
            costs = {name: [1 / value for value in values] for name, values in costs.items()}
        _compare(row, contender, costs, peers)


def _compare(row: Row, contender: Contender, costs: Mapping[str, Sequence[float]], peers: list[str]) -> None:
    """The best of the peers, and the ratio to it, of costs of any kind."""
    if contender.name in costs and (fit := [name for name in peers if name in costs]):
        row.versus = min(fit, key=lambda name: median(costs[name]))
        row.ratio = median(map(truediv, costs[row.versus], costs[contender.name]))


def _goal(case: Case, contender: Contender, peers: list[str]) -> str:
    """What is asked of the case's own unit."""
    if contender.target is None:
        return contender.goals.get(case.unit, "")
    return f"≥ {contender.target:g}x" if peers else f"≤ {contender.target:g} {case.unit}"


def _judge(row: Row, goal: str) -> None:
    """Whether the row reaches its goal; open where there is nothing to compare it with."""
    if not goal:
        return
    sign, number = goal.split()[:2]
    got = row.ratio if number.endswith("x") else row.median
    row.target = goal
    if got is not None:
        limit = float(number.rstrip("x"))
        row.met = got >= limit if sign == "≥" else got <= limit
