"""C kernels for training on a CPU: causal attention with RoPE, and GELU; compiled once, on the machine that runs them.

In torch, matmuls reach nine tenths of a processor's peak and SDPA a third: it uses general matmuls of small pieces, and
RoPE adds copies. attention.c computes a head of a row on one core, from its part of qkv to its part of y, in tiles that
fill the registers; tiles that the causal mask hides are skipped. The vectors are types of gcc and clang, so one source
serves AVX-512, AVX2, SSE and NEON.

Kernels are compiled with -march=native in under a second and not shipped: a wheel would be per processor or slow. The
cache is keyed by source, flags, compiler and processor, so that several machines may share a home folder. Before its
first use a kernel is compared with torch. If it cannot be compiled or loaded, or computes something else, torch does
the work, and `problem` says why. Threads are those of torch: a kernel is not linked with an OpenMP runtime but uses the
one that torch has loaded, because two runtimes would spin against each other.
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

from niels_gpt.system.user_cache import cache_folder

VARIABLE = "NIELS_GPT_NATIVE"
"""The environment variable: 0 for no C kernels, or the folder of the compiled ones (`~/.cache/niels-gpt`)."""
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp")
_SECONDS = 120
"""Time limit of a compiler."""


def allowed() -> bool:
    """Whether C kernels are tried: on Linux, unless the variable is 0."""
    return sys.platform.startswith("linux") and os.environ.get(VARIABLE) != "0"


_problems: dict[str, str] = {}
_Operation = Callable[[torch.Tensor], torch.Tensor]


def problem() -> str:
    """Why a kernel is not used, in one line; empty if all that were requested are used."""
    return next(iter(_problems.values()), "")


@functools.cache
def library(name: str, **defines: int) -> ctypes.CDLL | None:
    """`name`.c, compiled with these macros and loaded; None if that fails, and then `problem` says why."""
    if not allowed():
        return None
    try:
        return _load(_built(name, [f"-D{key}={value}" for key, value in defines.items()]))
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        _problems[name] = f"{name}.c: {str(err).strip()[:300]}"
        return None


def agrees(name: str, ours: _Operation, torchs: _Operation, shape: tuple[int, ...]) -> bool:
    """Whether a kernel gives torch's result and gradient for random input; if not, `problem` says so."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = []
    for operation in (ours, torchs):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            y = operation(leaf)
            weighted = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
        results.append((y.detach(), *torch.autograd.grad(weighted, leaf)))
    good = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*results, strict=True))
    if not good:
        _problems[name] = f"{name}.c: the compiled kernel disagrees with torch"
    return good


def _built(name: str, macros: list[str]) -> Path:
    """Path of the shared library, from the cache or the compiler.

    Raises ValueError without a compiler or if it fails, and OSError if the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError("no C compiler found: install gcc (apt install gcc), or set CC")
    flags = [*_FLAGS, *macros]
    key = hashlib.sha256()
    for text in (*compiler, *flags, _version(tuple(compiler)), _processor()):
        key.update(text.encode("utf-8") + b"\0")
    for source in sorted(_HERE.glob("*.[ch]")):
        key.update(source.read_bytes())
    folder = kernel_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}-{key.hexdigest()[:20]}.so"
    if not _trusted(path):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            compiled, library_file = Path(work, "kernel.o"), Path(work, "kernel.so")
            _run([*compiler, *flags, "-c", str(_HERE / f"{name}.c"), "-o", str(compiled)])
            # Linked without -fopenmp: torch has loaded an OpenMP runtime.
            _run([*compiler, "-shared", str(compiled), "-o", str(library_file), "-lm"])
            library_file.replace(path)
    return path


def find_compiler() -> list[str] | None:
    """The command of the C compiler with its options: $CC, gcc or cc; None if there is none."""
    commands = (shlex.split(os.environ.get("CC", "")), ["gcc"], ["cc"])
    return next((command for command in commands if command and shutil.which(command[0])), None)


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
    """Model and features of the processor: several machines may share a home folder."""
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(keys))


def kernel_folder() -> Path:
    """The folder of compiled kernels; it may not exist yet."""
    return Path(os.environ.get(VARIABLE) or cache_folder()).expanduser()


def _trusted(path: Path) -> bool:
    """Whether a file exists that belongs to this user and that no other user can write."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _load(path: Path) -> ctypes.CDLL:
    """Load a shared library. Raises OSError if torch has loaded no OpenMP runtime for it."""
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in loaded if line.count("/") > 1)
    openmp = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp"))]
    home = str(Path(torch.__file__).parent)
    openmp.sort(key=lambda p: not p.startswith(home))  # torch's own folder first, then torch.libs and others
    if not openmp:
        raise OSError("torch has loaded no OpenMP runtime")
    ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    return ctypes.CDLL(str(path))
