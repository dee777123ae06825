"""One thread per model: it steps the engine, and hands the tokens to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.request import Event, Request
from niels_gpt.serve.thread_count import ThreadCount

R = TypeVar("R")
TOGETHER_SECONDS, TOGETHER_PER_STREAM, MOST_TOGETHER = 0.02, 0.004, 0.15
"""The tokens of 20 ms, and of 4 ms more per stream, at most of 150 ms, are handed over together. A handover costs the
event loop a wake-up, a JSON text and a system call per stream, for which it competes with the model. The first and the
last tokens of a stream are handed over at once."""


def leave_cores_to_workers() -> int:
    """Let torch compute in one thread here and in threads that start later; return how many threads it had.

    OpenMP keeps the helpers of every thread that has computed with several, and lets all of them wait passively if they
    are more than the cores: decoding took 11 % longer.
    """
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    return number


class Inbox:
    """The events of the engine requests that belong to one HTTP request. Lives in the event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ready = asyncio.Event()
        self.failure: Exception | None = None
        """Why no more events come."""

    def put(self, event: Event) -> None:
        """Add an event and wake the reader."""
        self._events.append(event)
        self._ready.set()

    def fail(self, failure: Exception) -> None:
        """End the inbox: its reader gets this exception after the events."""
        self.failure = self.failure or failure
        self._ready.set()

    async def take(self) -> list[Event]:
        """Wait for events and return all there are. Raises the failure once there are none left."""
        while not self._events:
            if self.failure is not None:
                raise self.failure
            self._ready.clear()
            await self._ready.wait()
        events, self._events = self._events, []
        return events


class ModelWorker:
    """Runs an engine in a thread. All methods are called in the event loop, where `start` was called."""

    def __init__(self, engine: Engine, name: str, *, threads: int = 1) -> None:
        """threads: most threads that compute a step on a CPU."""
        self.engine = engine
        self._threads = ThreadCount(threads, torch.set_num_threads)
        self._name = name
        self._inboxes: dict[Request, Inbox] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._work = threading.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after its current step, and the engine's requests."""
        self._stopping = True
        self._work.set()
        self._thread.join()
        self.engine.close()
        for _, future in self._calls:
            future.cancel()
        self._fail_all(RuntimeError("the server has stopped"))

    def submit(self, inbox: Inbox, prompt: Sequence[int], **options: Any) -> Request:
        """Queue a prompt whose events go to the inbox; the options are those of `Engine.submit`."""
        request = self.engine.submit(prompt, **options)
        self._inboxes[request] = inbox
        self._work.set()
        return request

    def cancel(self, request: Request) -> None:
        """End a request: from the engine's next step on, its slot is free. It has no more events."""
        if self._inboxes.pop(request, None) is not None:
            self.engine.cancel(request)
            self._work.set()

    async def call(self, function: Callable[[], R]) -> R:
        """Run a function between two steps of the engine and return its result. If cancelled before, it never runs."""
        future: Future[R] = Future()
        self._calls.append((function, future))
        self._work.set()
        return await asyncio.wrap_future(future)

    # --- in the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        gathered: dict[Request, Event] = {}
        handed_over = 0.0
        while True:
            self._work.clear()
            if self._stopping:  # read after clear(): stop() sets it before the event, so its wake-up is never lost
                return
            if not self._calls and not self.engine.busy:
                self._work.wait()
                continue
            if self._calls:  # one call, then a step: neither waits for all of the other
                function, future = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function())
                    except BaseException as err:
                        future.set_exception(err)
            try:
                events = self._step() if self.engine.busy else []
            except Exception as err:  # broken weights, exhausted memory: the requests fail, the server stays
                handled = threading.Event()
                self._loop.call_soon_threadsafe(self._fail_all, err, handled)
                while not handled.wait(0.1) and not self._stopping:
                    pass
                continue
            urgent = []
            for event in events:
                earlier = gathered.get(event.request)
                gathered[event.request] = event if earlier is None else _joined(earlier, event)
                if event.finished is not None or event.request.received == len(event.tokens):  # the last, the first
                    urgent.append(event.request)
            now = time.monotonic()
            if now >= handed_over + min(TOGETHER_SECONDS + TOGETHER_PER_STREAM * len(gathered), MOST_TOGETHER):
                urgent, handed_over = list(gathered), now
            if urgent:
                self._loop.call_soon_threadsafe(self._deliver, [gathered.pop(request) for request in urgent])

    def _step(self) -> list[Event]:
        """Step the engine with the number of threads that is the fastest for as many tokens."""
        self._threads.choose(*self.engine.next_tokens)
        began = time.monotonic()
        events = self.engine.step()
        self._threads.add(time.monotonic() - began)
        return events

    # --- in the event loop ---------------------------------------------------------------------------

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request)
            if inbox is not None:
                if event.finished is not None:
                    del self._inboxes[event.request]
                inbox.put(event)

    def _fail_all(self, err: Exception, handled: threading.Event | None = None) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for request, inbox in inboxes.items():
            self.engine.cancel(request)
            inbox.fail(err)
        self._work.set()
        if handled is not None:
            handled.set()


def _joined(first: Event, second: Event) -> Event:
    """Two events of a request as one."""
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    return Event(second.request, first.tokens + second.tokens, second.finished, logprobs)
