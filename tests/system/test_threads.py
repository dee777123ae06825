"""Threads are counted before they are started; what a limit does not allow is lowered, or refused in one line."""

import resource
import subprocess
import sys
import threading

import pytest
import torch

from niels_gpt.cli import run_app
from niels_gpt.system import console, memory, progress, threads

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of the address space")


@pytest.fixture
def left(monkeypatch):
    """Set the address space that is left, as if a limit were set."""

    def set_left(size):
        monkeypatch.setattr(memory, "_limit", lambda: 3 << 29)
        monkeypatch.setattr(memory, "address_space_left", lambda: size)
        monkeypatch.setattr(threads, "_process_limit", lambda: None)
        monkeypatch.setattr(threads, "_size", lambda: 10 << 20)
        monkeypatch.setattr("niels_gpt.system.allocator.share_one_arena", lambda: None)

    return set_left


@pytest.mark.parametrize(("size", "number"), [(None, 8), (1 << 40, 8), (80 << 20, 3), (59 << 20, 0), (-5, 0)])
def test_the_address_space_limits_the_number_of_threads(left, size, number):
    left(size)
    assert threads.startable(8, reserve=50 << 20) == number


def test_the_number_of_processes_limits_the_number_of_threads(left, monkeypatch):
    left(None)
    monkeypatch.setattr(memory, "_limit", lambda: None)
    monkeypatch.setattr(threads, "_process_limit", lambda: 100)
    monkeypatch.setattr(threads, "_threads_of_user", lambda: 97)
    assert (threads.startable(8), threads.startable(2)) == (3, 2)
    with pytest.raises(MemoryError, match=r"x needs 8 threads; this user may have 100 .*ulimit -u.: raise it"):
        threads.check(8, "x")
    assert "ulimit -u" in threads.describe()


def test_root_and_large_limits_of_processes_are_not_counted(monkeypatch):
    for user, limit, counted in ((0, 50, None), (7, 50, 50), (7, 10**6, None), (7, resource.RLIM_INFINITY, None)):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert threads._process_limit() == counted


@linux
def test_the_threads_of_this_process_are_counted():
    assert threads._threads_of_user() >= 1


def test_a_refusal_names_need_rest_and_limit(left):
    left(64 << 20)
    threads.check(1, "training", reserve=0)
    with pytest.raises(MemoryError) as raised:
        threads.check(9, "training", reserve=0)
    assert console.error_message(raised.value) == (
        "training needs 9 threads with 0.09 GiB of address space, and 0.06 GiB are left; "
        "the limit of this process is 1.50 GiB (ulimit -v): raise it"
    )


def test_torch_uses_as_many_threads_as_fit(left, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    left(1 << 40)
    threads.fit_torch()
    assert used == []
    left((384 << 20) + 3 * (80 << 20) + (5 << 20))  # what torch computes, and three further threads of 80 MB
    with pytest.warns(UserWarning, match=r"using 4 of 16 threads.*1\.50 GiB .ulimit -v"):
        threads.fit_torch()
    assert used == [4]


@pytest.mark.parametrize("text", ["can't start new thread", "Resource temporarily unavailable"])
def test_a_thread_that_cannot_be_started_is_one_line(left, capsys, text):
    left(0)

    def app(**_):
        raise RuntimeError(text)

    with pytest.raises(SystemExit) as ended:
        run_app._run(app, [], "niels-gpt")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot start another thread; the limit of this process is 1.50 GiB (ulimit -v)")
    assert not threads.is_thread_error(RuntimeError("a shape")) and not threads.is_thread_error(ValueError(text))


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_lines_need_no_thread_that_cannot_be_started(left, monkeypatch, quiet):
    left(1 << 40 if quiet else 0)
    monkeypatch.setattr(console, "_quiet", quiet)
    started = []
    monkeypatch.setattr(progress.threading, "Thread", lambda **options: started.append(options))
    with progress._lines(lambda: "text"):
        assert started == []


@linux
@pytest.mark.parametrize("megabytes", [20, 70, 110])
def test_sentencepiece_and_arrow_are_not_started_without_memory_for_their_threads(tmp_path, megabytes):
    """In a process of its own: SentencePiece aborts it, pyarrow waits for ever."""
    code = f"""
import resource, sys
import pyarrow, sentencepiece, torch
from niels_gpt.cli import run_app
from niels_gpt.system import memory, threads
from niels_gpt.tokenizer.training import train_tokenizer

def app(**_):
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ({megabytes} << 20),) * 2)
    if {megabytes} < 60:
        threads.fit_datasets()
    train_tokenizer(["some words of a text"] * 50, {str(tmp_path)!r}, vocab_size=300)

run_app._run(app, [], "test")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    what = "reading data needs 2 threads" if megabytes < 60 else "training a tokenizer needs 9 threads"
    assert line.startswith(f"error: {what} with 0.") and "(ulimit -v): raise it" in line


def test_cores_are_left_to_other_threads():
    import torch

    before = torch.get_num_threads()
    seen = []
    try:
        torch.set_num_threads(3)
        assert threads.leave_cores_to_other_threads() == 3
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [torch.get_num_threads(), *seen] == [1, 1]
    finally:
        torch.set_num_threads(before)
