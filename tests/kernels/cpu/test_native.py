"""C kernels are compiled once, cached and checked; without them there is a reason, and torch does the work."""

import _ctypes
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from niels_gpt.kernels.cpu import native
from niels_gpt.kernels.cpu.native import kernel_file

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
@pytest.mark.parametrize("damage", ["truncated", "one bit", "foreign", "foreign with its hash", "a link"])
def test_a_damaged_or_foreign_kernel_is_compiled_again(fresh: Path, tmp_path: Path, damage: str) -> None:
    """In a process of its own: a truncated library that is loaded ends the process with SIGBUS."""
    assert native.library("gelu") is not None
    (path,) = fresh.iterdir()
    good = path.read_bytes()
    foreign = Path(_ctypes.__file__).read_bytes()
    bad = {
        "truncated": good[: len(good) // 2],
        "one bit": good[:9000] + bytes([good[9000] ^ 1]) + good[9001:],
        "foreign": foreign,
        "foreign with its hash": foreign + hashlib.sha256(foreign).digest(),
        "a link": good,
    }[damage]
    path.unlink()
    target = tmp_path / "elsewhere.so" if damage == "a link" else path
    target.write_bytes(bad)
    target.chmod(0o600)
    if target != path:
        path.symlink_to(target)
    code = "from niels_gpt.kernels.cpu import native, ops\nassert ops.gelu_kernel() is not None, native.problem()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes()[-32:] == hashlib.sha256(path.read_bytes()[:-32]).digest()
    assert b"gelu" in path.read_bytes() and not path.is_symlink()


@here
@pytest.mark.parametrize("which", ["folder", "parent"])
def test_a_folder_that_others_can_write_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    inner = fresh / "inner"
    monkeypatch.setenv(native.VARIABLE, str(inner))
    assert native.library("gelu") is not None
    (path,) = inner.iterdir()
    path.write_bytes(b"planted")
    open_folder = inner if which == "folder" else fresh
    open_folder.chmod(0o770)
    native.library.cache_clear()
    native._warn.cache_clear()
    with pytest.warns(UserWarning, match=f"chmod go-w {open_folder}") as printed:
        assert native.library("gelu") is not None
        assert native.library("attention", D=16) is not None
    assert len(printed) == 1
    assert path.read_bytes() == b"planted" and len(list(inner.iterdir())) == 1


@here
def test_what_was_checked_is_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced between the check and the load has no effect."""
    assert native.library("gelu") is not None
    (path,) = fresh.iterdir()
    load = kernel_file.load

    def replaced_first(*arguments: Any) -> Any:
        path.write_bytes(b"planted")
        return load(*arguments)

    monkeypatch.setattr(kernel_file, "load", replaced_first)
    native.library.cache_clear()
    assert native.library("gelu") is not None
    assert native.problem() == "" and path.read_bytes() == b"planted"


@here
def test_without_anonymous_files_a_private_copy_is_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    library = native.library("gelu")
    assert library is not None and "niels-gpt-" in library._name and not Path(library._name).exists()


@here
def test_a_kernel_that_cannot_be_stored_is_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, f"cannot write {fresh}: No space left on device: free some space")

    monkeypatch.setattr(kernel_file, "store", full)
    native._warn.cache_clear()
    with pytest.warns(UserWarning, match="not stored: cannot write .* free some space"):
        assert native.library("gelu") is not None


@here
def test_a_compiler_that_leaves_out_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int other(void) { return 0; }", encoding="utf-8")
    body = f'case "$*" in *-shared*) exec gcc -shared -fPIC {tmp_path}/other.c -o "$4";; *) exec gcc "$@";; esac'
    monkeypatch.setenv("CC", compiler(tmp_path / "other", body))
    native._version.cache_clear()
    assert native.library("gelu") is None
    assert "undefined symbol: gelu" in native.problem()


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


@here
def test_without_a_folder_a_kernel_is_used_but_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    folder = tmp_path / "file" / "folder"
    monkeypatch.setenv(native.VARIABLE, str(folder))
    native._warn.cache_clear()
    with pytest.warns(UserWarning, match=f"not stored: the folder {folder} cannot be used .*/file: File exists"):
        assert native.library("gelu") is not None
    assert native.problem() == ""


@here
@pytest.mark.parametrize("call", ["stat", "mkdir"])
def test_a_folder_that_cannot_be_checked(fresh: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def broken(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    library = kernel_file.load("gelu", native._compiled("gelu", ["gcc"], list(native._FLAGS)), ("gelu",))
    monkeypatch.setattr(native, "_compiled", lambda *_: b"compiled")
    monkeypatch.setattr(kernel_file, "load", lambda *_: library)
    monkeypatch.setattr(Path, call, broken)
    native._warn.cache_clear()
    with pytest.warns(UserWarning, match="not stored: the folder .* cannot be used .*: Input/output error"):
        assert native.library("gelu") is library


@here
def test_a_stored_kernel_that_cannot_be_read_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library("gelu") is not None
    (path,) = fresh.iterdir()
    before = path.stat().st_ino
    native.library.cache_clear()

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr("os.fstat", broken)
        assert kernel_file.read_checked(path) is None
    monkeypatch.setattr(kernel_file, "read_checked", lambda _: None)
    assert native.library("gelu") is not None and native.problem() == ""
    assert path.stat().st_ino != before


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
