"""Run a case: start its contenders, let them take turns, and compare the measurements."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import truediv
from statistics import median
from typing import Any

from bench.case import HIGHER_IS_BETTER, Case, Contender, load_case
from bench.peers import ROOT, environment_of, python_of


@dataclass
class Row:
    """One row of the result."""

    case: str
    contender: str
    role: str
    unit: str
    median: float | None = None
    ratio: float | None = None
    """How many times better than `versus` (faster, smaller): the median of the per-round ratios."""
    versus: str | None = None
    """The best peer of the group."""
    target: str = ""
    met: bool | None = None
    error: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One per round, if the median is computed from them."""
    values: list[float] = field(default_factory=list)
    """One per round in the unit, if the rounds measure it."""
    group: str = ""


def start(case: str, contender: Contender, *, device: str, quick: bool) -> subprocess.Popen[str]:
    """Start the process of a contender, in the environment of its package; leaving it as a context ends it."""
    defaults = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # several contenders compile at the same time
    python, options = python_of(contender.package), ["--quick"] if quick else []
    return subprocess.Popen(
        [python, "-m", "bench.worker", case, contender.name, device, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
        env={**defaults, **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def read_reply(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next reply of a worker, or an "error" if it has died."""
    line = process.stdout.readline() if process.stdout else ""
    reply: dict[str, Any] = json.loads(line) if line else {"error": f"failed: exit code {process.wait()}"}
    return reply


def run_case(
    name: str,
    *,
    rounds: int | None = None,
    quick: bool,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Run a case and return its rows. The contenders alternate round by round: A B C A B C ..."""
    case = load_case(name, device)
    rounds = rounds or (min(2, case.rounds) if quick else case.rounds)
    measured: dict[str, dict[str, Any]] = {c.name: {"seconds": [], "also": {}} for c in case.contenders}
    for first, last in [(n, n) for n in range(1, rounds + 1)] if case.fresh else [(1, rounds)]:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(case.starts) as pool:

            def begin(contender: Contender, stack: contextlib.ExitStack = stack) -> subprocess.Popen[str]:
                say(f"{case.name}: starting {contender.name}")
                worker = stack.enter_context(start(name, contender, device=device, quick=quick))
                measured[contender.name] |= read_reply(worker)
                if (environment := environment_of(contender.package)) is not None:
                    measured[contender.name].setdefault("facts", {})["environment"] = environment.name
                return worker

            good = [c for c in case.contenders if "error" not in measured[c.name]]
            workers = dict(zip((c.name for c in good), pool.map(begin, good), strict=True))
            for number in range(first, last + 1):
                for contender, worker in workers.items():
                    if "error" not in measured[contender]:
                        say(f"{case.name}: round {number} of {rounds}, {contender}")
                        _run_round(worker, measured[contender])
    return summarize(case, measured)


def _run_round(worker: subprocess.Popen[str], own: dict[str, Any]) -> None:
    """Request a round, and append its measurements to those of the contender."""
    with contextlib.suppress(BrokenPipeError):  # the worker has died, as read_reply will report
        print("go", file=worker.stdin, flush=True)
    reply = read_reply(worker)
    if "error" in reply:
        own["error"] = reply["error"]
        return
    own["seconds"].append(reply.pop("seconds"))
    for unit, value in reply.items():
        own["also"].setdefault(unit, []).append(value)


def summarize(case: Case, measured: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row per contender, in the order of the case, and one for each further unit and the % of the peak.

    `measured` maps each contender to the first reply of its worker, "seconds" (one per round) and "also" (unit -> one
    value per round). A contender with an "error" has only that in its row and is no peer of the others.
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
        own = measured[c.name]
        first = Row(case.name, c.name, c.role, case.unit, facts=own.get("facts", {}), error=own.get("error"))
        first.group = c.group
        rows.append(first)
        if first.error:
            continue
        if c.role == "peak":
            first.unit, first.median, first.seconds = "GFLOP/s", speeds[c.name], own["seconds"]
            continue
        peers = [peer.name for peer in case.contenders if peer.role == "peer" and peer.group == c.group]
        if case.unit in also[c.name]:
            _fill(first, c, also, peers)
        else:
            first.seconds = own["seconds"]
            _compare(first, c, costs, peers)
            in_ms = case.unit == "ms"
            first.median = 1000 * median(costs[c.name]) if in_ms else median(1 / s for s in costs[c.name])
        _judge(first, _goal(case, c, peers))
        if peak and own.get("gflop"):
            share = 100 * own["gflop"] / median(own["seconds"]) / peak
            rows.append(Row(case.name, c.name, c.role, "% of peak", share, group=c.group))
        for unit in (unit for unit in also[c.name] if unit != case.unit):
            rows.append(Row(case.name, c.name, c.role, unit, group=c.group))
            _fill(rows[-1], c, also, peers)
            _judge(rows[-1], c.goals.get(unit, ""))
    return rows


def _costs(contender: Contender, measured: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Return seconds per unit of work, one per round, less those of the baseline."""
    own = measured[contender.name]
    baseline = measured[contender.minus]["seconds"] if contender.minus else [0.0] * len(own["seconds"])
    return [(s - subtracted) / own["amount"] for s, subtracted in zip(own["seconds"], baseline, strict=True)]


def _fill(row: Row, contender: Contender, also: Mapping[str, Mapping[str, list[float]]], peers: list[str]) -> None:
    """Set median and ratio of a row from what the rounds measured in its unit."""
    row.values = also[contender.name][row.unit]
    row.median = median(row.values)
    costs = {name: found[row.unit] for name, found in also.items() if row.unit in found}
    if all(min(values) > 0 for values in costs.values()):  # a ratio to zero means nothing
        if row.unit in HIGHER_IS_BETTER:
            costs = {name: [1 / value for value in values] for name, values in costs.items()}
        _compare(row, contender, costs, peers)


def _compare(row: Row, contender: Contender, costs: Mapping[str, Sequence[float]], peers: list[str]) -> None:
    """Set the best peer and the ratio to it; lower costs are better."""
    if contender.name in costs and (fit := [name for name in peers if name in costs]):
        row.versus = min(fit, key=lambda name: median(costs[name]))
        row.ratio = median(map(truediv, costs[row.versus], costs[contender.name]))


def _goal(case: Case, contender: Contender, peers: list[str]) -> str:
    """Return the goal in the unit of the case."""
    if contender.target is None:
        return contender.goals.get(case.unit, "")
    return f"≥ {contender.target:g}x" if peers else f"≤ {contender.target:g} {case.unit}"


def _judge(row: Row, goal: str) -> None:
    """Set whether the row reaches its goal; None if there is nothing to compare it with."""
    if not goal:
        return
    sign, number = goal.split()[:2]
    got = row.ratio if number.endswith("x") else row.median
    row.target = goal
    if got is not None:
        limit = float(number.rstrip("x"))
        row.met = got >= limit if sign == "≥" else got <= limit
