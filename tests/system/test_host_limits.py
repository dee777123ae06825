"""What the limits of a process allow is used; what they do not allow is lowered, or refused in one line."""

import errno
import os
import resource
import subprocess
import sys

import pytest
import torch

from niels_gpt.cli import run_app
from niels_gpt.system import console, host_limits, progress

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of the address space")
SMALL = 250 << 20


@pytest.fixture
def unlimited(monkeypatch):
    monkeypatch.setattr(host_limits, "_address_space", lambda: None)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."),
            "3.00 GiB",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "20.00 GiB"),
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "7.45 GiB"),
        (MemoryError("std::bad_alloc"), ""),
        (MemoryError(), ""),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ""),
        (OSError(12, "Cannot allocate memory"), ""),
    ],
)
def test_what_could_not_be_allocated_is_named(unlimited, error, size):
    assert host_limits.is_out_of_memory(error)
    text = host_limits.describe_limit_error(error)
    assert text.startswith("out of memory") and size in text and "smaller" in text and "\n" not in text


def test_other_errors_are_not_errors_of_memory(unlimited):
    for error in (RuntimeError("a shape"), ImportError("no module"), ValueError("out of memory"), SystemError("bug")):
        assert not host_limits.is_out_of_memory(error)


def test_under_a_limit_the_limit_is_named(monkeypatch):
    monkeypatch.setattr(host_limits, "_address_space", lambda: 3 << 29)
    assert (
        host_limits.describe_limit_error(MemoryError())
        == "out of memory; the limit of this process is 1.50 GiB (ulimit -v): raise it"
    )
    assert host_limits.is_out_of_memory(SystemError("error return without exception set"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of the address space")
def test_a_command_that_cannot_load_torch_says_so_in_one_line(tmp_path):
    """Without the check numpy's BLAS ends the process, or an import ends in a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "niels_gpt", "train", "--config", "debug", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (SMALL, SMALL)),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    assert "needs 0." in done.stderr and "0.24 GiB (ulimit -v): raise it" in done.stderr


def run(code, soft, hard):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    ).stdout.strip()


@pytest.mark.parametrize(("soft", "hard", "raised"), [(50, 900, 900), (900, 900, 900)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft, hard, raised):
    code = (
        "import resource\nfrom niels_gpt.system import host_limits\nhost_limits.prepare_process()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run(code, soft, hard) == str((raised, hard))


def test_a_command_opens_more_files_than_the_soft_limit(tmp_path):
    code = (
        "from niels_gpt.cli.run_app import run_app\n"
        f"def app(**_): print(len([open('{tmp_path}/' + str(i), 'w') for i in range(200)]))\n"
        "run_app(app, [], name='x')"
    )
    assert run(code, 50, 400) == "200"


@pytest.mark.parametrize(("limit", "needs"), [(40, "at least 256"), (1024, "e.g. 4,096")])
def test_the_error_names_the_limit_and_the_need(monkeypatch, limit, needs):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    err = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "notes/a.md")
    message = console.error_message(err)
    assert message.startswith("cannot open notes/a.md: Too many open files: ")
    assert f"{limit:,} files (ulimit -n)" in message and needs in message and "raise it" in message
    assert host_limits.open_files_remedy(OSError(errno.ENOENT, "x")) == ""
    assert "file-max" in host_limits.open_files_remedy(OSError(errno.ENFILE, "x"))


@pytest.fixture
def left(monkeypatch):
    """Set the address space that is left, as if a limit were set."""

    def set_left(size):
        monkeypatch.setattr(host_limits, "_address_space", lambda: 3 << 29)
        monkeypatch.setattr(host_limits, "_address_space_left", lambda: size)
        monkeypatch.setattr(host_limits, "_process_limit", lambda: None)
        monkeypatch.setattr(host_limits, "_thread_size", lambda: 10 << 20)
        monkeypatch.setattr("niels_gpt.system.host_limits.share_one_arena", lambda: None)

    return set_left


@pytest.mark.parametrize(("size", "number"), [(None, 8), (1 << 40, 8), (80 << 20, 3), (59 << 20, 0), (-5, 0)])
def test_the_address_space_limits_the_number_of_threads(left, size, number):
    left(size)
    assert host_limits.startable(8, reserve=50 << 20) == number


def test_the_number_of_processes_limits_the_number_of_threads(left, monkeypatch):
    left(None)
    monkeypatch.setattr(host_limits, "_address_space", lambda: None)
    monkeypatch.setattr(host_limits, "_process_limit", lambda: 100)
    monkeypatch.setattr(host_limits, "_threads_of_user", lambda: 97)
    assert (host_limits.startable(8), host_limits.startable(2)) == (3, 2)
    with pytest.raises(MemoryError, match=r"x needs 8 threads; this user may have 100 .*ulimit -u.: raise it"):
        host_limits.check_threads(8, "x")
    assert "ulimit -u" in host_limits.describe_limit_error(RuntimeError("can't start new thread"))


def test_root_and_large_limits_of_processes_are_not_counted(monkeypatch):
    for user, limit, counted in ((0, 50, None), (7, 50, 50), (7, 10**6, None), (7, resource.RLIM_INFINITY, None)):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert host_limits._process_limit() == counted


@linux
def test_the_threads_of_this_process_are_counted():
    assert host_limits._threads_of_user() >= 1


def test_a_refusal_names_need_rest_and_limit(left):
    left(64 << 20)
    host_limits.check_threads(1, "training", reserve=0)
    with pytest.raises(MemoryError) as raised:
        host_limits.check_threads(9, "training", reserve=0)
    assert console.error_message(raised.value) == (
        "training needs 9 threads with 0.09 GiB of address space, and 0.06 GiB are left; "
        "the limit of this process is 1.50 GiB (ulimit -v): raise it"
    )


def test_torch_uses_as_many_threads_as_fit(left, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    left(1 << 40)
    host_limits.fit_torch()
    assert used == []
    left((384 << 20) + 3 * (80 << 20) + (5 << 20))  # what torch computes, and three further threads of 80 MB
    with pytest.warns(UserWarning, match=r"using 4 of 16 threads.*1\.50 GiB .ulimit -v"):
        host_limits.fit_torch()
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
    assert not host_limits.is_thread_error(RuntimeError("a shape")) and not host_limits.is_thread_error(
        ValueError(text)
    )


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
from niels_gpt.system import host_limits
from niels_gpt.tokenizer.training import train_tokenizer

def app(**_):
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ({megabytes} << 20),) * 2)
    if {megabytes} < 60:
        host_limits.fit_datasets()
    train_tokenizer(["some words of a text"] * 50, {str(tmp_path)!r}, vocab_size=300)

run_app._run(app, [], "test")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    what = "reading data needs 2 threads" if megabytes < 60 else "training a tokenizer needs 9 threads"
    assert line.startswith(f"error: {what} with 0.") and "(ulimit -v): raise it" in line


class FakeLibc:
    def __init__(self):
        self.calls = []

    def mallopt(self, option, value):
        self.calls.append((option, value))
        return 1


@pytest.mark.parametrize(
    ("function", "options"),
    [
        # M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD -3 and M_ARENA_MAX -8 in glibc's malloc.h; mallopt takes a C int.
        (host_limits.keep_freed_memory, {-3: 2**30, -1: 2**31 - 1}),
        (host_limits.share_one_arena, {-8: 1}),
    ],
)
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_allocator_is_set_on_linux_only(monkeypatch, function, options, platform):
    libc = FakeLibc()
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    function.__wrapped__()
    assert dict(libc.calls) == (options if platform == "linux" else {})


@pytest.mark.parametrize("failure", [OSError("no libc.so.6"), AttributeError("mallopt")])
def test_other_c_libraries_are_no_error(monkeypatch, failure):
    asked = []

    def missing(name):
        asked.append(name)
        raise failure

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", missing)
    host_limits.keep_freed_memory.__wrapped__()
    assert asked == ["libc.so.6"]
