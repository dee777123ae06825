"""The runs of a folder for a program that asks again and again: only what has changed is read again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from niels_gpt.runs.catalog import EVAL_FILE, RunSummary, find_runs, is_locked, summarize
from niels_gpt.runs.environment import DIVERGED, FAILED, read_environment
from niels_gpt.runs.environment import FILE as ENVIRONMENT_FILE
from niels_gpt.runs.metrics_follower import MetricsFollower

LIST_SECONDS = 1.0
"""The list is at most so old."""
REST = 20
"""A run that trains is summarized again after so many times what the last summary took."""
FOLLOWED = 8
"""Runs whose metrics are kept in memory."""
_SIGNATURE_FILES = ("config.yaml", "metrics.jsonl", EVAL_FILE, ENVIRONMENT_FILE)


@dataclasses.dataclass(frozen=True)
class ListedRun:
    """A run of the list."""

    id: str
    """A hash of its name: names of folders are not part of an id, so an id is never a path."""
    path: Path
    summary: RunSummary
    state: str
    """`training`, `finished`, `stopped` (it can be resumed), `imported` (a public model) or `failed`."""
    problem: str | None
    """Why it failed."""
    signature: Any
    """Of the files that the summary was read from."""
    due: float
    """When to read a changed run again (time.monotonic): one with long metrics less often."""


class WatchedRuns:
    """The runs in a folder, by id. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[str, ListedRun] = {}
        self._listed = -LIST_SECONDS
        self._followers: OrderedDict[str, tuple[threading.Lock, MetricsFollower]] = OrderedDict()

    def all(self) -> list[ListedRun]:
        """The runs, newest first. Raises OSError if the folder cannot be read; one that does not exist has none."""
        with self._lock:
            if time.monotonic() - self._listed >= LIST_SECONDS:
                self._refresh()
                self._listed = time.monotonic()
            return sorted(self._runs.values(), key=lambda run: (-run.summary.changed, run.summary.name))

    def find(self, identifier: str) -> ListedRun | None:
        """The run of an id in the list, as it is now; None if there is none (any more)."""
        if identifier not in self._runs:
            self.all()
        with self._lock:
            known = self._runs.get(identifier)
            if known is None or not known.path.is_dir():
                return None
            self._runs[identifier] = found = _listed(known.path, known.summary.name, known)
            return found

    def curves(self, run: ListedRun, *, after: int, version: str) -> dict[str, Any]:
        """The metrics of a run since an earlier call; see `MetricsFollower.curves`."""
        with self._lock:
            if run.id not in self._followers:
                self._followers[run.id] = threading.Lock(), MetricsFollower(run.path / "metrics.jsonl")
            self._followers.move_to_end(run.id)
            lock, follower = self._followers[run.id]
            while len(self._followers) > FOLLOWED:
                self._followers.popitem(last=False)
        with lock:
            follower.read()
            return follower.curves(after=after, version=version)

    def _refresh(self) -> None:
        found: dict[str, ListedRun] = {}
        for path in find_runs(self.folder):
            name = str(path.relative_to(self.folder))
            identifier = _identifier(name)
            found[identifier] = _listed(path, name, self._runs.get(identifier))
        self._runs = found


def _identifier(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _signature(path: Path) -> Any:
    """A value that changes when the summary of a run may change."""
    stats: list[tuple[int, int, int] | None] = []
    for name in _SIGNATURE_FILES:
        try:
            info = (path / name).stat()
            stats.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            stats.append(None)
    return is_locked(path), stats


def _listed(path: Path, name: str, known: ListedRun | None) -> ListedRun:
    """Return a run as it is now: what is known of it if its files are the same, or were read a moment ago."""
    signature = _signature(path)
    began = time.monotonic()
    if known is not None and (
        signature == known.signature or (signature[0] == known.signature[0] and began < known.due)
    ):
        return known
    summary = summarize(path, name)
    state, problem = str(summary.state), summary.problem
    if state == "damaged":
        state = "failed"
    elif state == "stopped":
        environment = read_environment(path)
        last = environment.sessions[-1] if environment is not None and environment.sessions else None
        if last is not None and last.outcome in (DIVERGED, FAILED):
            state, problem = "failed", last.reason or last.outcome
    due = time.monotonic() + REST * (time.monotonic() - began)
    return ListedRun(_identifier(name), path, summary, state, problem, signature, due)
