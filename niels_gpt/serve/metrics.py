"""What is known of a request, and Prometheus metrics of a server, in a separate registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from niels_gpt.serve.errors import CLIENT_CLOSED

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


class Metrics:
    """Counters by route and model. Labels are routes and ids of loaded models only: a client cannot add one."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"niels_gpt_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"niels_gpt_{name}", text, labels, registry=self._registry, buckets=SECONDS)

        self._requests = counter("requests", "Requests.", "route", "status")
        self._seconds = histogram("request_seconds", "Time from the first byte to the end of the response.", "route")
        self._first = histogram("first_token_seconds", "Time from the first byte to the first token.", "model")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts that the prefix cache had.", "model")
        self._completion = counter("completion_tokens", "Generated tokens.", "model")
        self._ended = counter("ended_early", "Responses that ended early.", "outcome")
        self._active = Gauge(
            "niels_gpt_active", "Continuations that run or wait for a slot.", ("model",), registry=self._registry
        )
        self._waiting = Gauge(
            "niels_gpt_waiting", "Continuations that wait for a slot.", ("model",), registry=self._registry
        )

    def watch(self, model: str, active: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Report the continuations of a model that run or wait."""
        self._active.labels(model).set_function(active)
        self._waiting.labels(model).set_function(waiting)

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

    def models(self, names: Iterable[str]) -> None:
        """Report the counters of these models from the start, with zeros."""
        for name in names:
            for each in (self._prompt, self._cached, self._completion, self._first):
                each.labels(name)
