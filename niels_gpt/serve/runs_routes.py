"""The runs in a folder, for the page: list, config, metrics, samples, memorization reports and batch rows.

A run is named by an id of the list, never by a path. Folders may be damaged, or written at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import anyio
from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from starlette.responses import Response

from niels_gpt.config import RunConfig
from niels_gpt.data.source_paths import display_name
from niels_gpt.report.stored_reports import ReportError, StoredReport, find_reports, level_names
from niels_gpt.runs.catalog import find_runs
from niels_gpt.runs.environment import FILE as ENVIRONMENT_FILE
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import EVAL_FILE, PROGRESS, RunInfo, is_locked
from niels_gpt.runs.metrics_follower import MetricsFollower
from niels_gpt.serve.errors import ERRORS, APIError
from niels_gpt.system import files
from niels_gpt.system.console import error_message
from niels_gpt.training.tasks.base import DataTask
from niels_gpt.training.tasks.documents import uses_bytes
from niels_gpt.training.trained_data import open_trained_data

LIST_SECONDS = 1.0
"""The list is at most so old."""
REST = 20
"""A run that trains is summarized again after so many times what the last summary took."""
FOLLOWED = 8
"""Runs whose metrics are kept in memory."""
_SIGNATURE_FILES = ("config.yaml", "metrics.jsonl", EVAL_FILE, ENVIRONMENT_FILE)
THREADS = 2
"""Requests that read files at a time."""
WAITING = 64
"""Requests that may wait for a thread; one more gets 429."""
SAMPLE_BYTES = 64 * 1024
STRIP_CHARACTERS = 20_000
ROWS = 16
"""Most batch rows of a response."""
ROW_CHARACTERS = 20_000
OPEN_REPORTS = 4
LARGEST = 2**53 - 1
"""Largest integer that JavaScript reads exactly."""

RunId = Annotated[str, PathParameter(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Query(ge=0, le=LARGEST)]


class _Known(NamedTuple):
    """A run as it was read."""

    run: RunInfo
    locked: bool
    signature: Any
    """Of the files that the summary was read from."""
    due: float
    """When to read a changed run again (time.monotonic): one with long metrics less often."""


class RunsReader:
    """What the routes read. Only files that have changed are read again. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[str, _Known] = {}
        self._listed = -LIST_SECONDS
        self._follower = functools.lru_cache(FOLLOWED)(lambda path: (threading.Lock(), MetricsFollower(path)))
        self._report = functools.lru_cache(OPEN_REPORTS)(lambda path, *_changed: StoredReport(path))
        self._data: tuple[Any, RunConfig, DataTask] | None = None
        self._limiter, self._data_limiter = anyio.CapacityLimiter(THREADS), anyio.CapacityLimiter(1)
        self._waiting = 0

    async def respond(self, read: Callable[[], Any], *, opens_data: bool = False) -> Response:
        """Return what a function reads as JSON. It runs in a thread; opens_data: one at a time."""
        if self._waiting >= WAITING:
            raise APIError(429, "too many requests for runs: try again in 2 s", retry_after=2)
        self._waiting += 1
        try:
            limiter = self._data_limiter if opens_data else self._limiter
            body = await anyio.to_thread.run_sync(lambda: _to_json(_reading(read)), limiter=limiter)
        finally:
            self._waiting -= 1
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    def all(self) -> list[RunInfo]:
        """The runs, newest first. Raises OSError if the folder cannot be read; one that does not exist has none."""
        with self._lock:
            if time.monotonic() - self._listed >= LIST_SECONDS:
                found = [(path, str(path.relative_to(self.folder))) for path in find_runs(self.folder)]
                self._runs = {identifier_of(name): self._read(path, name) for path, name in found}
                self._listed = time.monotonic()
            runs = [known.run for known in self._runs.values()]
        return sorted(runs, key=lambda run: (-run.changed, run.name))

    def run(self, identifier: str) -> RunInfo:
        """The run of an id in the list, as it is now. Raises APIError 404 if there is none (any more)."""
        if identifier not in self._runs:
            self.all()
        with self._lock:
            known = self._runs.get(identifier)
            if known is None or not known.run.path.is_dir():
                raise APIError(404, f"there is no run {identifier} in the list of /api/runs", code="run_not_found")
            self._runs[identifier] = found = self._read(known.run.path, known.run.name)
            return found.run

    def curves(self, run: RunInfo, *, after: int, version: str) -> dict[str, Any]:
        """The metrics of a run since an earlier call; see `MetricsFollower.curves`."""
        with self._lock:
            lock, follower = self._follower(run.path / "metrics.jsonl")
        with lock:
            follower.read()
            return follower.curves(after=after, version=version)

    def _read(self, path: Path, name: str) -> _Known:
        """Read a run; return what is known of it if its files are the same, or were read a moment ago."""
        known = self._runs.get(identifier_of(name))
        locked, signature = is_locked(path), [_stat(path / file) for file in _SIGNATURE_FILES]
        began = time.monotonic()
        if known is not None and known.locked == locked and (known.signature == signature or began < known.due):
            return known
        run = RunInfo(path, name)
        _ = run.summary, run.failure  # read now, with this signature
        return _Known(run, locked, signature, time.monotonic() + REST * (time.monotonic() - began))

    def report(self, run: RunInfo, identifier: str) -> StoredReport:
        """A report on a run. Raises APIError 404."""
        path = find_reports(run.path).get(identifier)
        if path is None:
            raise APIError(404, f"the run has no report {identifier}", code="report_not_found")
        return self._open(path)

    def reports(self, run: RunInfo) -> list[dict[str, Any]]:
        """The reports on a run, without their strips; of damaged ones the problem."""
        listed = []
        for identifier, path in find_reports(run.path).items():
            try:
                report = self._open(path)
            except ReportError as err:
                listed.append({"id": identifier, "folder": path.parent.name, "problem": str(err)})
                continue
            if path.is_relative_to(run.path) or report.checkpoint_run == run.path.name:
                listed.append({"id": identifier, **report.summary})
        return listed

    def _open(self, path: Path) -> StoredReport:
        info = path.stat()
        return self._report(path, info.st_mtime_ns, info.st_size)

    def data(self, run: RunInfo) -> tuple[RunConfig, DataTask]:
        """The config and the opened data of a run. Raises APIError 409 if the data is gone or has changed."""
        info = (run.path / "config.yaml").stat()
        key = (run.path, info.st_mtime_ns, info.st_size)
        if self._data is None or self._data[0] != key:
            self._data = None  # the data of two runs may not fit into memory
            try:
                self._data = (key, *open_trained_data(RunFolder(run.path)))
            except (ValueError, OSError) as err:
                raise APIError(409, error_message(err), code="data_not_available") from None
        return self._data[1:]


def runs_router(folder: Path) -> APIRouter:
    """Return the routes under /api/runs for the runs in a folder."""
    reader = RunsReader(folder)
    damaged = "The run, its report or its data cannot be read, or has changed."
    responses = {**ERRORS, 409: {**ERRORS[404], "description": damaged}}
    router = APIRouter(prefix="/api/runs", responses=responses, tags=["runs"])

    def route(path: str, *, opens_data: bool = False) -> Callable[[Callable[..., Any]], None]:
        """Add a route whose response is what a function reads."""

        def add(read: Callable[..., Any]) -> None:
            @functools.wraps(read)
            async def endpoint(**parameters: Any) -> Response:
                return await reader.respond(lambda: read(**parameters), opens_data=opens_data)

            router.get(path, response_model=None)(endpoint)

        return add

    @route("")
    def list_runs() -> Any:
        """The runs, newest first."""
        return {"folder": files.display_path(folder), "runs": [_listed(run) for run in reader.all()]}

    @route("/{run_id}")
    def show_run(run_id: RunId) -> Any:
        """A run: data, settings that differ from the defaults, checkpoints and next commands."""
        return _described(reader.run(run_id))

    @route("/{run_id}/metrics")
    def show_metrics(
        run_id: RunId,
        after: Annotated[int, Query(ge=-1, le=LARGEST)] = -1,
        version: Annotated[str, Query(max_length=64)] = "",
    ) -> Any:
        """Loss, learning rate and tokens/s by step, and the loss of each held-out set.

        With `after` (the last step received) and `version` of the last response, only points that are new or changed.
        The receiver drops its points from step `from` on, and appends these. A point is the mean of `width` steps.
        """
        run = reader.run(run_id)
        curves = reader.curves(run, after=after, version=version)
        samples = RunFolder(run.path).sample_steps()
        listed = _listed(run)
        if curves["last_step"] is not None:  # newer than the summary
            listed["steps"] = curves["last_step"] + 1
        return {**listed, **curves, "newest_sample": samples[-1] if samples else None}

    @route("/{run_id}/samples")
    def list_samples(run_id: RunId) -> Any:
        """The steps after which a sample was written."""
        return {"steps": RunFolder(reader.run(run_id).path).sample_steps()}

    @route("/{run_id}/samples/{step}")
    def show_sample(run_id: RunId, step: Annotated[int, PathParameter(ge=0, le=LARGEST)]) -> Any:
        """The sample that was written after a number of steps."""
        samples = RunFolder(reader.run(run_id).path)
        if step not in samples.sample_steps():
            raise APIError(404, f"there is no sample after {step} steps", code="sample_not_found")
        text, complete = samples.read_sample(step, most=SAMPLE_BYTES)
        return {"step": step, "text": text, "complete": complete}

    @route("/{run_id}/reports", opens_data=True)
    def list_reports(run_id: RunId) -> Any:
        """The memorization reports in the run or its pipeline."""
        return {"levels": level_names(), "reports": reader.reports(reader.run(run_id))}

    @route("/{run_id}/reports/{report_id}/strips/{strip}", opens_data=True)
    def show_strip(
        run_id: RunId, report_id: RunId, strip: Annotated[int, PathParameter(ge=0, le=LARGEST)], start: Count = 0
    ) -> Any:
        """A document of a report: spans of text with their level and the lowest and highest P(z)."""
        report = reader.report(reader.run(run_id), report_id)
        if strip >= report.strips:
            raise APIError(404, f"the report has {report.strips} strips", code="strip_not_found")
        about = report.summary["strips"][strip]
        spans = report.spans(strip, start=start, most=STRIP_CHARACTERS)
        end, total = min(start + STRIP_CHARACTERS, about["characters"]), about["characters"]
        return {"document": about["document"], "start": start, "end": end, "total": total, "spans": spans}

    @route("/{run_id}/batches/{step}", opens_data=True)
    def show_batch(
        run_id: RunId,
        step: Annotated[int, PathParameter(ge=0, le=2**31 - 1)],
        first: Count = 0,
        rows: Annotated[int, Query(ge=1, le=ROWS)] = ROWS,
    ) -> Any:
        """The rows of a training step: source, document, offset and text."""
        config, task = reader.data(reader.run(run_id))
        try:
            origins = task.origins(step)
        except (ValueError, OSError) as err:
            raise APIError(409, error_message(err), code="data_not_available") from None
        return {
            "step": step,
            "total_steps": config.train.total_steps,
            "unit": "bytes" if uses_bytes(config) else "tokens",
            "context": config.model.T,
            "total": len(origins),
            "rows": [
                {
                    "row": row.row,
                    "source": display_name(row.source, config.data.wiki),
                    "document": files.display_path(row.document),
                    "offset": row.offset,
                    "text": row.text[:ROW_CHARACTERS],
                    "complete": len(row.text) <= ROW_CHARACTERS,
                }
                for row in origins[first : first + rows]
            ],
        }

    return router


def _reading(read: Callable[[], Any]) -> Any:
    """Call a function that reads a run. What disappears meanwhile is a 404."""
    try:
        return read()
    except ReportError as err:
        raise APIError(409, str(err), code="report_damaged") from None
    except FileNotFoundError:
        raise APIError(404, "the run was changed or removed meanwhile: load it again", code="run_not_found") from None
    except OSError as err:
        raise APIError(409, error_message(err), code="not_readable") from None


def identifier_of(name: str) -> str:
    """Return the id of a run: a hash of its name. Names of folders are no part of it, so an id is never a path."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _stat(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None if it cannot be read."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def _listed(run: RunInfo) -> dict[str, Any]:
    last = run.last or {}
    return {
        "id": identifier_of(run.name),
        "name": run.name,
        "state": run.state if run.failure is None else "failed",
        "problem": run.failure,
        **{name: run.summary[name] for name in ("changed", "disk", *PROGRESS)},
        **{name: last.get(name) for name in ("loss", "lr", "tokens_per_s")},
    }


def _described(run: RunInfo) -> dict[str, Any]:
    """Return the list's entry of a run with what `RunInfo.detail` adds; a damaged run has the entry only."""
    try:
        detail = RunInfo(run.path).detail
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as err:
        detail = {"state": "damaged", "problem": error_message(err)}
    listed = _listed(run)
    if detail["state"] == "damaged":
        return {**listed, "state": "failed", "problem": listed["problem"] or detail["problem"]}
    added = ("context", "vocabulary", "data", "last_evals", "checkpoints", "same_files", "next")
    differences = {key: {"default": old, "value": new} for key, (old, new) in detail["differences"].items()}
    return {**listed, **{name: detail[name] for name in added}, "differences": differences}


def _to_json(value: Any) -> str:
    """Return JSON that every browser reads: no NaN, no integers beyond 2**53, lone surrogates as U+FFFD."""
    return json.dumps(_clean(value), allow_nan=False, default=str)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8") if not value.isascii() else value
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) <= LARGEST else None
    return value
