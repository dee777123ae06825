"""Run a case: start its contenders, let them take turns, compare what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.case import Case, Contender, load_case

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Measured:
    """What one contender's process reported."""

    amount: float = 1.0
    gflop: float | None = None
    facts: dict[str, object] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One per round."""
    error: str | None = None


@dataclass
class Row:
    """One line of the result."""

    case: str
    contender: str
    role: str
    unit: str
    median: float | None = None
    ratio: float | None = None
    """How many times as fast as the fastest peer of the group: the median of the rounds' ratios."""
    versus: str | None = None
    """That peer."""
    peak_share: float | None = None
    """The share of the measured matmul peak that is reached."""
    target: str = ""
    met: bool | None = None
    error: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


class Worker:
    """A contender's process; `close` ends it."""

    def __init__(self, case: str, contender: str, *, quick: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", case, contender, *(["--quick"] if quick else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        self.hello = self._read()

    def round(self) -> dict[str, Any]:
        """Run one round; its reply, with "seconds" or "error"."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the missing reply says so
        return self._read()

    def close(self) -> None:
        """End the process, by force where it does not go by itself."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"failed: exit code {self._process.wait()}"}
        return reply


def run_case(name: str, *, rounds: int, quick: bool, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """The rows of a case. Every contender does a round, then every one the next: A B C, A B C, ..."""
    case = load_case(name)
    with ExitStack() as open_workers:
        workers: dict[str, Worker] = {}
        measured: dict[str, Measured] = {}
        for contender in case.contenders:
            say(f"{case.name}: starting {contender.name}")
            worker = workers[contender.name] = Worker(name, contender.name, quick=quick)
            open_workers.callback(worker.close)
            measured[contender.name] = Measured(**worker.hello)
        for number in range(rounds):
            for contender_name, worker in workers.items():
                say(f"{case.name}: round {number + 1} of {rounds}, {contender_name}")
                mine = measured[contender_name]
                if mine.error is None:
                    reply = worker.round()
                    mine.error = reply.get("error")
                    mine.seconds += [reply["seconds"]] if mine.error is None else []
    return summarise(case, measured)


def summarise(case: Case, measured: dict[str, Measured]) -> list[Row]:
    """One row per contender, in the order of the case; contenders with an error have only that."""
    good = {c.name: c for c in case.contenders if measured[c.name].error is None and measured[c.name].seconds}
    costs = {name: _costs(contender, measured) for name, contender in good.items()}
    peaks = [(m.gflop or 0.0) / min(m.seconds) for m in (measured[c.name] for c in good.values() if c.role == "peak")]
    rows = []
    for contender in case.contenders:
        mine = measured[contender.name]
        row = Row(case.name, contender.name, contender.role, case.unit, facts=mine.facts, seconds=mine.seconds)
        rows.append(row)
        if contender.name not in good:
            row.error = mine.error or "no rounds"
            continue
        if contender.role == "peak":
            row.unit, row.median = "GFLOP/s", median((mine.gflop or 0.0) / s for s in mine.seconds)
            row.facts = {**mine.facts, "best": max(peaks)}
            continue
        cost = costs[contender.name]
        row.median = median(1 / c for c in cost) if case.unit == "tokens/s" else 1000 * median(cost)
        row.versus = min(
            (name for name, c in good.items() if c.role == "peer" and c.group == contender.group),
            key=lambda name: median(costs[name]),
            default=None,
        )
        if row.versus is not None:
            row.ratio = median(theirs / ours for theirs, ours in zip(costs[row.versus], cost, strict=True))
        if mine.gflop is not None and peaks:
            row.peak_share = median(mine.gflop / s for s in mine.seconds) / max(peaks)
        _judge(row, contender)
    return rows


def _costs(contender: Contender, measured: dict[str, Measured]) -> list[float]:
    """Seconds per unit of work, one per round, what is to be subtracted subtracted."""
    mine = measured[contender.name]
    if contender.minus is None:
        return [s / mine.amount for s in mine.seconds]
    return [s - less for s, less in zip(mine.seconds, measured[contender.minus].seconds, strict=True)]


def _judge(row: Row, contender: Contender) -> None:
    """Fill in the target and whether it is met, as far as it can be told."""
    if contender.at_least is not None:
        row.target = f"≥ {contender.at_least:g}x"
        row.met = None if row.ratio is None else row.ratio >= contender.at_least
    elif contender.at_most is not None and row.median is not None:
        row.target = f"≤ {contender.at_most:g} {row.unit}"
        row.met = row.median <= contender.at_most
