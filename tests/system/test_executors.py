"""Jobs are worked on by several workers, and their results come in the order of the jobs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from niels_gpt.system import executors, host_limits
from niels_gpt.system.executors import ThreadExecutor, default_workers


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_follow_the_order_of_jobs(workers):
    def work(job):
        time.sleep(0.004 * (job % 3 == 0))
        return job * job

    assert list(ThreadExecutor(workers).in_order(range(30), work)) == [(job, job * job) for job in range(30)]
    assert list(ThreadExecutor(workers).in_order([], work)) == []


def test_fewer_workers_run_where_the_limits_allow_no_more_threads(monkeypatch):
    names, both = set(), threading.Barrier(2, timeout=60)

    def work(job):
        names.add(threading.current_thread().name)
        if job < 2:
            both.wait()
        return job

    monkeypatch.setattr(host_limits, "startable", lambda wanted, **_: min(wanted, 5))  # two per worker
    assert list(ThreadExecutor(16).in_order(range(30), work)) == [(job, job) for job in range(30)]
    assert names == {"encoding_0", "encoding_1"}
    monkeypatch.setattr(host_limits, "startable", lambda wanted, **_: 1)
    with pytest.raises(MemoryError, match="encoding needs 2 threads"):
        list(ThreadExecutor(16).in_order(range(30), work))


@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_workers_and_queued_jobs(workers):
    lock, all_run = threading.Lock(), threading.Barrier(workers, timeout=60)
    running = most = submitted = 0

    def jobs():
        nonlocal submitted
        for job in range(60):
            submitted += 1
            yield job

    def work(job):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if job < workers:
            all_run.wait()
        time.sleep(0.002)
        with lock:
            running -= 1

    for done, _ in enumerate(ThreadExecutor(workers).in_order(jobs(), work)):
        assert submitted - done <= 2 * workers + 2
    assert most == workers


def test_error_is_raised_in_the_order_of_jobs():
    def work(job):
        if job == 5:
            raise RuntimeError("job 5")
        return job

    results = ThreadExecutor(2).in_order(range(50), work)
    assert [next(results)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="job 5"):
        next(results)


def test_error_of_the_iterator_of_jobs_is_raised():
    def jobs():
        yield from range(3)
        raise RuntimeError("no more jobs")

    with pytest.raises(RuntimeError, match="no more jobs"):
        list(ThreadExecutor(2).in_order(jobs(), lambda job: job))


def test_closing_waits_for_running_jobs_and_starts_no_more(monkeypatch):
    started, finished, proceed = [], [], threading.Event()

    def work(job):
        started.append(job)
        if job:
            proceed.wait(60)
        finished.append(job)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments, **options):  # the queued jobs are cancelled before it waits
            threading.Timer(0.05, proceed.set).start()
            super().shutdown(*arguments, **options)

    monkeypatch.setattr(executors, "ThreadPoolExecutor", Pool)
    results = ThreadExecutor(2).in_order(range(1000), work)
    assert next(results)[0] == 0  # 1 and 2 are running, others are queued
    results.close()
    assert proceed.is_set()
    assert sorted(finished) == sorted(started)
    assert set(started) <= {0, 1, 2}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encoding")]


def test_default_workers_are_twice_the_cores(monkeypatch):
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert default_workers() == 6
    monkeypatch.delattr(executors.os, "sched_getaffinity")
    monkeypatch.setattr(executors.os, "cpu_count", lambda: 4)
    assert default_workers() == 8
    monkeypatch.setattr(executors.os, "cpu_count", lambda: None)
    assert default_workers() == 2


def test_the_argument_of_a_job_is_what_the_work_gets():
    jobs = [(1, "a"), (2, "b")]
    assert list(ThreadExecutor(2).in_order(jobs, str.upper, lambda job: job[1])) == [((1, "a"), "A"), ((2, "b"), "B")]


@pytest.mark.parametrize("workers", [1, 3])
def test_pieces_follow_the_order_of_jobs_and_are_bounded(workers):
    lock = threading.Lock()
    made = 0

    def work(job):
        nonlocal made
        for number in range(job % 7 * 5):
            with lock:
                made += 1
            yield job, number

    wanted = [(job, (job, number)) for job in range(20) for number in range(job % 7 * 5)]
    found = []
    for pair in ThreadExecutor(workers).in_pieces(range(20), work, lambda job: job % 7 * 5):
        found.append(pair)
        assert made - len(found) <= workers * (executors.PIECES_AHEAD + 1) + (2 * workers + 1) * executors.PIECES_AHEAD
    assert found == wanted


def test_the_error_of_a_piece_is_raised_and_closing_ends_the_work():
    closed = []

    def work(job):
        try:
            for number in range(1000):
                if (job, number) == (1, 3):
                    raise RuntimeError("piece 3 of job 1")
                yield number
        finally:
            closed.append(job)

    pieces = ThreadExecutor(2).in_pieces(range(2), work, lambda job: 1000)
    with pytest.raises(RuntimeError, match="piece 3 of job 1"):
        list(pieces)
    pieces = ThreadExecutor(2).in_pieces(range(100), work, lambda job: 1000)
    next(pieces)
    pieces.close()
    assert sorted(closed[2:]) in ([0], [0, 1])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reading")]


@pytest.mark.parametrize("workers", [0, -1])
def test_an_executor_needs_a_worker(workers):
    with pytest.raises(ValueError, match=f"workers must be at least 1, got {workers}"):
        ThreadExecutor(workers)
