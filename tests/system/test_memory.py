"""Errors of memory are one line that names the need and the limit."""

import resource
import subprocess
import sys

import pytest

from niels_gpt.system import memory

SMALL = 250 << 20


@pytest.fixture
def unlimited(monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda: None)


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
    assert memory.is_out_of_memory(error)
    text = memory.describe(error)
    assert text.startswith("out of memory") and size in text and "smaller" in text and "\n" not in text


def test_other_errors_are_not_errors_of_memory(unlimited):
    for error in (RuntimeError("a shape"), ImportError("no module"), ValueError("out of memory"), SystemError("bug")):
        assert not memory.is_out_of_memory(error)


def test_under_a_limit_the_limit_is_named(monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda: 3 << 29)
    assert (
        memory.describe(MemoryError()) == "out of memory; the limit of this process is 1.50 GiB (ulimit -v): raise it"
    )
    assert memory.is_out_of_memory(SystemError("error return without exception set"))


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
