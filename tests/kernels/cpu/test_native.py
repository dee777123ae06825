"""C kernels are compiled once, cached and checked; without them there is a reason, and torch does the work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from niels_gpt.kernels.cpu import native

here = pytest.mark.skipif(not (shutil.which("gcc") and sys.platform.startswith("linux")), reason="needs Linux and gcc")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing loaded before."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv(native.VARIABLE, str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native, "_problems", {})
    native.library.cache_clear()
    yield folder
    native.library.cache_clear()


def compiler(path: Path, body: str) -> str:
    """A stand-in for a compiler: a shell script."""
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@here
def test_a_kernel_is_compiled_once_and_cached(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", compiler(tmp_path / "counting", f'echo "$@" >> {calls}; exec gcc "$@"'))
    assert native.library("gelu") is not None
    assert native.problem() == ""
    compiled = [line for line in calls.read_text(encoding="utf-8").splitlines() if " -c " in line]
    assert len(compiled) == 1 and "-march=native" in compiled[0]
    native.library.cache_clear()
    assert native.library("gelu") is not None
    again = [line for line in calls.read_text(encoding="utf-8").splitlines() if " -c " in line]
    assert again == compiled
    assert [path.suffix for path in fresh.iterdir()] == [".so"]  # no other files remain
    assert native.library("attention", D=16) is not native.library("attention", D=32)
    assert len(list(fresh.iterdir())) == 3


@here
def test_another_processor_or_compiler_has_separate_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library("gelu") is not None
    monkeypatch.setattr(native, "_processor", lambda: "another")
    native.library.cache_clear()
    assert native.library("gelu") is not None
    assert len(list(fresh.iterdir())) == 2


@here
def test_a_file_that_others_may_write_is_compiled_again(fresh: Path) -> None:
    assert native.library("gelu") is not None
    (path,) = fresh.iterdir()
    good = path.read_bytes()
    path.unlink()
    path.write_bytes(b"somebody else's")
    path.chmod(0o666)
    native.library.cache_clear()
    assert native.library("gelu") is not None
    assert path.stat().st_mode & 0o022 == 0
    assert len(path.read_bytes()) == len(good)


@here
def test_only_torchs_openmp_runtime_is_loaded() -> None:
    """One runtime is loaded before and after a kernel."""
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from niels_gpt.kernels.cpu import native\n"
        "def runtimes():\n"
        "    lines = Path('/proc/self/maps').read_text().splitlines()\n"
        "    return {line.split()[-1] for line in lines if 'omp' in line.rsplit('/', 1)[-1] and 'arm_' not in line}\n"
        "before = runtimes()\n"
        "assert native.library('gelu') is not None, native.problem()\n"
        "assert runtimes() == before, runtimes() - before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "allowed", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.library("gelu") is None
    assert "gelu.c" in native.problem() and "install gcc" in native.problem()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'x.c:3: error: no such flag' >&2; exit 1", "failed: x.c:3: error: no such flag"),
        ("exit 3", "failed: 3"),
        ('test "$1" = --version && exit 0; exit 0', "kernel.so"),  # reports success and writes nothing
    ],
)
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, reason: str) -> None:
    monkeypatch.setattr(native, "allowed", lambda: True)
    monkeypatch.setenv("CC", compiler(tmp_path / "broken", body))
    native._version.cache_clear()
    assert native.library("gelu") is None
    assert native.problem().startswith("gelu.c: ") and reason in native.problem()
    assert "\n" not in native.problem()


@here
def test_a_compiler_that_writes_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done'
    monkeypatch.setenv("CC", compiler(tmp_path / "odd", script))
    assert native.library("gelu") is None
    assert native.problem()


def test_a_folder_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "allowed", lambda: True)
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(native.VARIABLE, str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("CC", compiler(tmp_path / "fine", "exit 0"))
    assert native.library("gelu") is None
    assert "folder" in native.problem()


def test_the_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native.library("gelu") is None
    assert native.problem() == ""  # as requested


def test_a_kernel_is_compared_with_torch_before_it_is_used() -> None:
    assert native.agrees("fine", torch.exp, lambda x: x.exp(), (5,))
    assert native.problem() == ""
    assert not native.agrees("wrong", lambda x: x.exp() * 1.01, torch.exp, (5,))
    assert "wrong.c" in native.problem()


def test_its_gradient_is_compared_too() -> None:
    assert not native.agrees("slope", lambda x: x.detach() + 0 * x, lambda x: x.clone(), (5,))
