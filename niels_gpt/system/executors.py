"""Run a function on many jobs and yield the results in the order of the jobs: on threads, or on a Ray cluster.

The results do not depend on the number of workers. Only a bounded number of jobs is read ahead, so memory stays flat
however many jobs there are.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from niels_gpt.system import threads

_THREADS_PER_WORKER = 2  # SentencePiece starts a thread for each batch

Job = TypeVar("Job")
Result = TypeVar("Result")


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

    def in_order(
        self, jobs: Iterable[Job], work: Callable[[Any], Result], argument: Callable[[Job], Any] = itself
    ) -> Iterator[tuple[Job, Result]]:
        """As `Executor.in_order`; closing the generator waits for the running jobs.

        Fewer workers run where the limits of the process allow no more threads. Raises MemoryError if not even one can
        be started.
        """
        threads.check(_THREADS_PER_WORKER, "encoding")
        workers = min(self.workers, threads.startable(_THREADS_PER_WORKER * self.workers) // _THREADS_PER_WORKER)
        pending: collections.deque[tuple[Job, Future[Result]]] = collections.deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
            try:
                for job in jobs:
                    pending.append((job, pool.submit(work, argument(job))))
                    if len(pending) > 2 * workers:
                        first, result = pending.popleft()
                        yield first, result.result()
                while pending:
                    first, result = pending.popleft()
                    yield first, result.result()
            finally:
                for _, future in pending:
                    future.cancel()
