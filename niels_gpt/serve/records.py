"""One record per request, for the access log (a JSON line without texts, query strings, addresses) and for metrics."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt.serve.errors import CLIENT_CLOSED, HTTPMiddleware
from niels_gpt.serve.limits import Admission

_KEY = "niels_gpt.record"
LONGEST = 10_000
"""Lines that may wait for the disk or the pipe; more are dropped and counted."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass
class Record:
    """What is known of a request when it ends. Routes fill it in."""

    began: float = field(default_factory=time.monotonic)
    status: int = CLIENT_CLOSED
    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    """Seconds from the start of the request to its first token."""
    outcome: str | None = None
    """How a response ended that began well: disconnect, timeout, shutdown or error."""


def record_of(scope: Scope) -> Record:
    """Return the record of a request."""
    record: Record = scope[_KEY]
    return record


class Metrics:
    """Counters by route and model. Labels are routes and ids of loaded models only: a client cannot add one."""

    def __init__(self, models: Mapping[str, Admission]) -> None:
        """models: what counts the continuations of each model; its other counters begin with zero."""
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"niels_gpt_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"niels_gpt_{name}", text, labels, registry=self._registry, buckets=SECONDS)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"niels_gpt_{name}", text, ("model",), registry=self._registry)

        self._requests = counter("requests", "Requests.", "route", "status")
        self._seconds = histogram("request_seconds", "Time from the first byte to the end of the response.", "route")
        self._first = histogram("first_token_seconds", "Time from the first byte to the first token.", "model")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts that the prefix cache had.", "model")
        self._completion = counter("completion_tokens", "Generated tokens.", "model")
        self._ended = counter("ended_early", "Responses that ended early.", "outcome")
        active = gauge("active", "Continuations that run or wait for a slot.")
        waiting = gauge("waiting", "Continuations that wait for a slot.")
        for name, admission in models.items():
            active.labels(name).set_function(partial(getattr, admission, "active"))
            waiting.labels(name).set_function(partial(getattr, admission, "waiting"))
            for each in (self._prompt, self._cached, self._completion, self._first):
                each.labels(name)

    def observe(self, scope: Scope, record: Record, seconds: float) -> None:
        """Count a request that has ended."""
        path = getattr(scope.get("route"), "path", None) or "other"
        self._requests.labels(path, str(record.status)).inc()
        self._seconds.labels(path).observe(seconds)
        if record.outcome is not None:
            self._ended.labels(record.outcome).inc()
        if record.model is not None:
            self._prompt.labels(record.model).inc(record.prompt_tokens)
            self._cached.labels(record.model).inc(record.cached_tokens)
            self._completion.labels(record.model).inc(record.completion_tokens)
            if record.first_token is not None:
                self._first.labels(record.model).observe(record.first_token)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class LineWriter:
    """Writes lines to a file in a thread, so that a slow disk or a full pipe does not stop the server."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(LONGEST)
        self._dropped = 0
        self._counting = threading.Lock()  # both threads count
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line; drop it if too many are waiting."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop(1)

    def close(self) -> None:
        """Write what is queued, for at most two seconds. The file stays open."""
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(timeout=1)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                line = json.dumps({"dropped_lines": dropped}) + "\n" + line
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except (OSError, ValueError):  # a full disk, or a closed file: the server goes on
                self._drop(dropped + 1)

    def _drop(self, lines: int) -> None:
        with self._counting:
            self._dropped += lines


class AccessLog(HTTPMiddleware):
    """ASGI middleware that gives every request a record, and at its end logs it and counts it in the metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics, writer: LineWriter | None) -> None:
        super().__init__(app)
        self._metrics = metrics
        self._writer = writer

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope[_KEY] = Record()

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            seconds = time.monotonic() - record.began
            self._metrics.observe(scope, record, seconds)
            if self._writer is not None:
                self._writer.write(json.dumps(_line(scope, record, seconds)))


def _line(scope: Scope, record: Record, seconds: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": record.status,
        "ms": round(1000 * seconds, 1),
    }
    if record.model is not None:
        line |= {
            "model": record.model,
            "tokens_in": record.prompt_tokens,
            "tokens_cached": record.cached_tokens,
            "tokens_out": record.completion_tokens,
        }
    if record.first_token is not None:
        line["first_token_ms"] = round(1000 * record.first_token, 1)
    if record.outcome is not None:
        line["outcome"] = record.outcome
    return line
