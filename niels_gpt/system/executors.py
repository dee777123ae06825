"""Run a function on many jobs and yield the results in the order of the jobs: on threads, or on a Ray cluster.

The results do not depend on the number of workers. Only a bounded number of jobs is read ahead, so memory stays flat
however many jobs there are.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from niels_gpt.system import host_limits

_THREADS_PER_WORKER = 2  # SentencePiece starts a thread for each batch
PIECES_AHEAD = 2
"""Pieces of a job that wait for the caller."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class _End(NamedTuple):
    """What follows the last piece of a job."""

    error: BaseException | None


def itself(job: Any) -> Any:
    """The job: the argument of `work` where a job is sent to it as it is."""
    return job


class Executor(Protocol):
    """What maps jobs to results, in order."""

    def in_order(
        self, jobs: Iterable[Job], work: Callable[[Any], Result], argument: Callable[[Job], Any] = itself
    ) -> Iterator[tuple[Job, Result]]:
        """Yield (job, work(argument(job))) for every job, in input order. Closing the generator ends the work.

        `work` and its argument may be sent to another process; the job itself is not.
        """
        ...

    def in_pieces(
        self, jobs: Iterable[Job], work: Callable[[Job], Iterator[Result]], pieces: Callable[[Job], int]
    ) -> Iterator[tuple[Job, Result]]:
        """Yield (job, result) for each of the pieces(job) results that work(job) yields, in input order.

        For large jobs: a bounded number of pieces is in memory here, however many a job has.
        """
        ...

    def on_each_node(self, work: Callable[[Any], Result], argument: Any) -> list[Result]:
        """The result of work(argument) on every other machine that takes jobs; raises what `work` raises there."""
        ...

    def status(self) -> str:
        """What works now, for a line of progress; empty if there is nothing to tell."""
        ...


def default_workers() -> int:
    """Twice the cores available to this process: one thread encodes while another waits for the interpreter lock."""
    return 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class ThreadExecutor:
    """Threads of this process. They suit work that releases the interpreter lock; nothing need be picklable."""

    def __init__(self, workers: int | None = None) -> None:
        """`workers` run at once, and as many more jobs are queued. Raises ValueError for fewer than 1."""
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.workers = workers or default_workers()

    def status(self) -> str:
        return ""

    def on_each_node(self, work: Callable[[Any], Result], argument: Any) -> list[Result]:
        return []

    def in_order(
        self, jobs: Iterable[Job], work: Callable[[Any], Result], argument: Callable[[Job], Any] = itself
    ) -> Iterator[tuple[Job, Result]]:
        """As `Executor.in_order`; closing the generator waits for the running jobs. Raises as `_run` does."""

        def only(sent: tuple[Job, Any]) -> Iterator[Result]:
            yield work(sent[1])

        sent = ((job, argument(job)) for job in jobs)
        with contextlib.closing(self._run("encoding", sent, only)) as results:  # type: ignore[type-var]
            for (job, _), result in results:
                yield job, result

    def in_pieces(
        self, jobs: Iterable[Job], work: Callable[[Job], Iterator[Result]], pieces: Callable[[Job], int]
    ) -> Iterator[tuple[Job, Result]]:
        """As `Executor.in_pieces`. Raises as `_run` does."""
        return self._run("reading", jobs, work)

    def _run(
        self, what: str, jobs: Iterable[Job], work: Callable[[Job], Iterator[Result]]
    ) -> Iterator[tuple[Job, Result]]:
        """Yield (job, result) for each result of a job: each is at most PIECES_AHEAD results ahead of the caller.

        Fewer workers run where the limits of the process allow no more threads. Raises MemoryError if not even one can
        be started.
        """
        ended = threading.Event()

        def produce(channel: queue.Queue[Result | _End], job: Job) -> None:
            def put(item: Result | _End) -> bool:
                while not ended.is_set():
                    with contextlib.suppress(queue.Full):
                        channel.put(item, timeout=0.1)
                        return True
                return False

            if ended.is_set():
                return
            try:
                with contextlib.closing(work(job)) as results:  # type: ignore[type-var]
                    if not all(map(put, results)):
                        return
                put(_End(None))
            except BaseException as err:
                put(_End(err))

        host_limits.check_threads(_THREADS_PER_WORKER, what)
        workers = min(self.workers, host_limits.startable(_THREADS_PER_WORKER * self.workers) // _THREADS_PER_WORKER)
        pending: collections.deque[tuple[Job, queue.Queue[Result | _End]]] = collections.deque()
        with ThreadPoolExecutor(workers, thread_name_prefix=what) as pool:
            try:
                for job in jobs:
                    pending.append((job, queue.Queue(PIECES_AHEAD)))
                    pool.submit(produce, pending[-1][1], job)
                    if len(pending) > 2 * workers:
                        yield from _pieces(*pending.popleft())
                while pending:
                    yield from _pieces(*pending.popleft())
            finally:
                ended.set()


def _pieces(job: Job, channel: queue.Queue[Any]) -> Iterator[tuple[Job, Any]]:
    """Yield the pieces of a job as they come; raise its error."""
    while not isinstance(item := channel.get(), _End):
        yield job, item
    if item.error is not None:
        raise item.error
