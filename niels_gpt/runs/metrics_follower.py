"""Follow metrics.jsonl while a run trains: read what was appended, and return curves of a limited number of points."""

from __future__ import annotations

import bisect
import math
import secrets
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.runs.metrics import headline_evals, parse_line

MOST_POINTS = 1500
"""Most points of a curve. Longer runs are averaged over 2, 4, 8, ... steps."""
LARGEST_STEP = 2**53
"""Lines of larger steps are skipped: JavaScript could not tell them apart."""
COLUMNS = ("loss", "lr", "tokens_per_s")
_CHUNK = 4 * 2**20
_TAIL = 128


class MetricsFollower:
    """The steps of one metrics.jsonl in memory.

    Reading it again costs the new lines only. A file that was replaced (a resumed run drops the steps that run again)
    is read from its start. Damaged lines are skipped; a last line without its end is read when it is complete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_again()

    def _start_again(self) -> None:
        self._offset = 0
        self._tail = b""
        self._token = secrets.token_hex(4)
        self._steps = array("q")
        self._columns = {name: array("d") for name in COLUMNS}
        self._evals: list[tuple[int, dict[str, float]]] = []

    @property
    def last_step(self) -> int | None:
        """The last step that was read, from 0; None if there is none."""
        return self._steps[-1] if self._steps else None

    def read(self) -> None:
        """Read what was appended since the last call. A file that does not exist has no lines."""
        if not self._path.is_file():
            self._start_again()
            return
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._start_again()
                file.seek(0)
            rest = b""
            while chunk := file.read(_CHUNK):
                complete, end, rest = (rest + chunk).rpartition(b"\n")
                for text in complete.split(b"\n") if end else ():
                    self._add(text)
                self._offset += len(complete) + len(end)
                self._tail = (self._tail + complete + end)[-_TAIL:]

    def _add(self, text: bytes) -> None:
        line = parse_line(text)
        if line is None or not 0 <= line["step"] < LARGEST_STEP:
            return
        step = line["step"]
        if self._steps and step <= self._steps[-1]:  # these steps ran again
            self._drop_from(step)
        self._steps.append(step)
        for name, column in self._columns.items():
            column.append(_as_float(line.get(name)))
        if evals := headline_evals(line.get("evals", {})):
            self._evals.append((step, {name: _as_float(value) for name, value in evals.items()}))

    def _drop_from(self, step: int) -> None:
        keep = bisect.bisect_left(self._steps, step)
        del self._steps[keep:]
        for column in self._columns.values():
            del column[keep:]
        while self._evals and self._evals[-1][0] >= step:
            self._evals.pop()
        self._token = secrets.token_hex(4)

    def curves(self, *, after: int = -1, version: str = "", most: int = MOST_POINTS) -> dict[str, Any]:
        """Return the points of the steps after a step, as JSON values; None for what is unknown or not finite.

        after, version: the last step and the version of an earlier response. If the version is still the same, only
        points that are new or changed are returned. The receiver drops its points from step `from` on, and appends
        these. `width`: number of steps of a point: its step and learning rate are the last of them, loss and tokens/s
        the means; `low` and `high` are the extreme losses.
        """
        width = 1
        if self._steps:
            while (self._steps[-1] // width) - (self._steps[0] // width) >= most:
                width *= 2
        current = f"{self._token}-{width}"
        first = max(after // width * width, 0) if version == current else 0
        begin = bisect.bisect_left(self._steps, first)
        steps = np.array(self._steps[begin:], dtype=np.int64)
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1)) if len(steps) else np.zeros(0, dtype=np.int64)
        points: dict[str, Any] = {"step": _last_of_each(steps, starts).tolist()}
        for name in COLUMNS:
            values = np.array(self._columns[name][begin:], dtype=np.float64)
            points[name] = _as_json(_last_of_each(values, starts) if name == "lr" else _means(values, starts))
            if name == "loss" and width > 1:
                finite = np.where(np.isfinite(values), values, np.nan)
                for key, function in (("low", np.fmin), ("high", np.fmax)):
                    points[key] = _as_json(function.reduceat(finite, starts) if len(starts) else finite)
        return {
            "version": current,
            "from": first,
            "width": width,
            "last_step": self.last_step,
            "points": points,
            "evals": self._eval_curves(first, width),
        }

    def _eval_curves(self, first: int, width: int) -> dict[str, dict[str, list[Any]]]:
        """Return the losses of each held-out set, the last one of every `width` steps."""
        found: dict[str, dict[int, tuple[int, float]]] = {}
        for step, evals in self._evals[bisect.bisect_left(self._evals, first, key=lambda pair: pair[0]) :]:
            for name, value in evals.items():
                found.setdefault(name, {})[step // width] = (step, value)
        return {
            name: {
                "step": [step for step, _ in points.values()],
                "loss": [value if math.isfinite(value) else None for _, value in points.values()],
            }
            for name, points in found.items()
        }


def _as_float(value: Any) -> float:
    """Return a number of JSON as a float: NaN if it is missing, infinite if it is too large."""
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _last_of_each(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the last value of each group."""
    return values[np.append(starts[1:], len(values)) - 1] if len(starts) else values[:0]


def _means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each group; NaN if there is none."""
    if not len(starts):
        return np.zeros(0)
    known = np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(
            np.add.reduceat(np.where(known, values, 0.0), starts) / np.add.reduceat(known, starts, dtype=int)
        )


def _as_json(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
