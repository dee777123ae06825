"""Kernels in C for what torch is slow at on a CPU, compiled on the machine that needs them, once.

What cannot be compiled or loaded, or computes something else than torch does, is not used: then torch does the work,
and `problem` says why. The threads are torch's own: a kernel is not linked with an OpenMP of its own but finds the one
that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

VARIABLE = "NIELS_GPT_NATIVE"
"""The environment variable: 0 for no kernels in C, or the folder where compiled ones stay (`~/.cache/niels-gpt`)."""
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp")
_SECONDS = 120
"""After which a compiler is given up."""


def allowed() -> bool:
    """Whether kernels in C are tried at all: on Linux, unless the variable is 0."""
    return sys.platform.startswith("linux") and os.environ.get(VARIABLE) != "0"


_problems: dict[str, str] = {}
_Operation = Callable[[torch.Tensor], torch.Tensor]


def problem() -> str:
    """Why a kernel could not be had, in a line; empty where all that were wanted are there."""
    return next(iter(_problems.values()), "")


@functools.cache
def library(name: str, **defines: int) -> ctypes.CDLL | None:
    """`name`.c, compiled with macros and loaded; None where that cannot be done, and then `problem` says why."""
    if not allowed():
        return None
    try:
        return _load(_built(name, [f"-D{key}={value}" for key, value in defines.items()]))
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        _problems[name] = f"{name}.c: {str(err).strip()[:300]}"
        return None


def agrees(name: str, ours: _Operation, torchs: _Operation, shape: tuple[int, ...]) -> bool:
    """Whether a kernel gives what torch gives, and the same gradient, for some numbers. If not, that is a problem."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for operation in (ours, torchs):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            y = operation(leaf)
            weighed = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
        found.append((y.detach(), *torch.autograd.grad(weighed, leaf)))
    good = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*found, strict=True))
    if not good:
        _problems[name] = f"{name}.c: what the compiler made of it computes something else"
    return good


def _built(name: str, macros: list[str]) -> Path:
    """The shared library, from the cache or from the compiler.

    Raises ValueError without a compiler, or where it fails, and OSError where nothing can be written.
    """
    compiler = _compiler()
    flags = [*_FLAGS, *macros]
    key = hashlib.sha256()
    for text in (*compiler, *flags, _version(tuple(compiler)), _processor()):
        key.update(text.encode("utf-8") + b"\0")
    for source in sorted(_HERE.glob("*.[ch]")):
        key.update(source.read_bytes())
    folder = _folder()
    made = folder / f"{name}-{key.hexdigest()[:20]}.so"
    if not _ours(made):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            part, whole = Path(work, "part.o"), Path(work, "whole.so")
            _run([*compiler, *flags, "-c", str(_HERE / f"{name}.c"), "-o", str(part)])
            _run([*compiler, "-shared", str(part), "-o", str(whole), "-lm"])  # without -fopenmp: torch has one
            whole.replace(made)
    return made


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in (chosen, ["gcc"], ["cc"]):
        if command and shutil.which(command[0]):
            return command
    raise ValueError("there is no C compiler here: install gcc")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ValueError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
    return done.stdout


def _processor() -> str:
    """What the processor can do: a home folder may be shared by several."""
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(keys))


def _folder() -> Path:
    """Where compiled kernels stay. Raises OSError."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "niels-gpt")
    folder = Path(os.environ.get(VARIABLE) or home).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _ours(path: Path) -> bool:
    """Whether a file is there that nobody else can have written."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _load(path: Path) -> ctypes.CDLL:
    """Raises OSError where torch has no OpenMP that the library could use."""
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in loaded if line.count("/") > 1)
    openmp = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp"))]
    home = str(Path(torch.__file__).parent)
    openmp.sort(key=lambda p: not p.startswith(home))  # torch's own folder, then torch.libs and others
    if not openmp:
        raise OSError("torch has no OpenMP here")
    ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    return ctypes.CDLL(str(path))
