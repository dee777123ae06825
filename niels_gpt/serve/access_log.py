"""The access log: one JSON line per request, without texts, query strings and addresses."""

from __future__ import annotations

import json
import queue
import threading
import time
from datetime import UTC, datetime
from typing import IO, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt.serve.metrics import Metrics, Record

_KEY = "niels_gpt.record"
LONGEST = 10_000
"""Lines that may wait for the disk or the pipe; more are dropped and counted."""


def record_of(scope: Scope) -> Record:
    """Return the record of a request."""
    record: Record = scope[_KEY]
    return record


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


class AccessLog:
    """ASGI middleware that gives every request a record, and at its end logs it and counts it in the metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics, writer: LineWriter | None) -> None:
        self._app = app
        self._metrics = metrics
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = Record()

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observe)
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
