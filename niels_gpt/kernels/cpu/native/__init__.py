"""C kernels for training and decoding on a CPU, compiled once, on the machine that runs them.

In torch, matmuls reach nine tenths of a processor's peak and SDPA a third: it uses general matmuls of small pieces, and
RoPE adds copies. attention.c computes a head of a row on one core, from its part of qkv to its part of y, in tiles that
fill the registers; tiles that the causal mask hides are skipped. In decoding, matmuls have few rows and are as slow:
matmul.c and token_attention.c read weights and cache once, in order. The vectors are types of gcc and clang, so one
source serves AVX-512, AVX2, SSE and NEON.

Kernels are compiled with -march=native in under a second and not shipped: a wheel would be per processor or slow. The
cache is keyed by source, flags, compiler and processor, so that several machines may share a home folder. Before its
first use a kernel is compared with torch. If it cannot be compiled or loaded, or computes something else, torch does
the work, and `problem` says why. A stored kernel that is damaged or foreign is compiled again (`kernel_file`); a cache
folder that other users can write is not used at all. Threads are those of torch: a kernel is not linked with an OpenMP
runtime but uses the one that torch has loaded, because two runtimes would spin against each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from niels_gpt.kernels.cpu.native import kernel_file
from niels_gpt.system import files, user_cache

VARIABLE = "NIELS_GPT_NATIVE"
"""The environment variable: 0 for no C kernels, or the folder of the compiled ones (`~/.cache/niels-gpt`)."""
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp")
_SECONDS = 120
"""Time limit of a compiler."""
_SYMBOLS = {
    "gelu": ("gelu",),
    "attention": ("attention_forward", "attention_backward", "attention_scratch_size"),
    "matmul": ("matmul", "matmul_store_panels", "matmul_panels_size"),
    "token_attention": ("token_attention", "token_attention_scratch_size"),
}
"""The functions of each source that Python calls."""


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
        _use_openmp_of_torch()
        return _stored_or_built(name, [f"-D{key}={value}" for key, value in defines.items()])
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as err:
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
    return equals(name, *results)


def equals(name: str, ours: Sequence[torch.Tensor], torchs: Sequence[torch.Tensor]) -> bool:
    """Whether the results of a kernel are those of torch; if not, `problem` says so."""
    good = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(ours, torchs, strict=True))
    if not good:
        _problems[name] = f"{name}.c: the compiled kernel disagrees with torch"
    return good


def _stored_or_built(name: str, macros: list[str]) -> ctypes.CDLL:
    """The loaded library, from the cache or else from the compiler.

    Raises ValueError without a compiler or if it fails, AttributeError if what it wrote lacks a function, and OSError
    if that cannot be loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError("no C compiler found: install gcc (apt install gcc), or set CC")
    flags = [*_FLAGS, *macros]
    folder = kernel_folder()
    unusable = _why_unusable(folder)
    if unusable:
        _warn(f"compiled kernels are not stored: {unusable}, or set {VARIABLE} to a folder of your own")
        return kernel_file.load(name, _compiled(name, compiler, flags), _SYMBOLS[name])
    path = folder / f"{name}-{_key(compiler, flags)}.so"
    stored = kernel_file.read_checked(path)
    if stored is not None:
        with contextlib.suppress(OSError, AttributeError):  # not a kernel after all: compile it again
            return kernel_file.load(name, stored, _SYMBOLS[name])
    built = _compiled(name, compiler, flags)
    loaded = kernel_file.load(name, built, _SYMBOLS[name])
    try:
        kernel_file.store(path, built)
    except OSError as err:
        _warn(f"the compiled kernel is not stored: {files.describe_os_error(err)}")
    return loaded


def _why_unusable(folder: Path) -> str:
    """Why kernels are neither read from a folder nor stored there, and the remedy; empty if they are."""
    try:
        user_cache.create_private(folder)
        return user_cache.why_unsafe(folder)
    except OSError as err:
        return f"the folder {folder} cannot be used ({err.filename}: {err.strerror}): repair it"


def _key(compiler: list[str], flags: list[str]) -> str:
    key = hashlib.sha256()
    for text in (*compiler, *flags, _version(tuple(compiler)), _processor()):
        key.update(text.encode("utf-8") + b"\0")
    for source in sorted(_HERE.glob("*.[ch]")):
        key.update(source.read_bytes())
    return key.hexdigest()[:20]


def _compiled(name: str, compiler: list[str], flags: list[str]) -> bytes:
    """Compile `name`.c in a new folder that only this user can read, and return the shared library."""
    with tempfile.TemporaryDirectory(prefix="niels-gpt-") as work:
        compiled, library_file = Path(work, "kernel.o"), Path(work, "kernel.so")
        _run([*compiler, *flags, "-c", str(_HERE / f"{name}.c"), "-o", str(compiled)])
        # Linked without -fopenmp: torch has loaded an OpenMP runtime.
        _run([*compiler, "-shared", str(compiled), "-o", str(library_file), "-lm"])
        return library_file.read_bytes()


@functools.cache
def _warn(text: str) -> None:
    """Print a warning, once per process: every kernel meets the same folder."""
    warnings.warn(text, stacklevel=2)


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
    return Path(os.environ.get(VARIABLE) or user_cache.cache_folder()).expanduser()


def _use_openmp_of_torch() -> None:
    """Let kernels find the OpenMP runtime that torch has loaded. Raises OSError if there is none."""
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in loaded if line.count("/") > 1)
    openmp = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp"))]
    home = str(Path(torch.__file__).parent)
    openmp.sort(key=lambda p: not p.startswith(home))  # torch's own folder first, then torch.libs and others
    if not openmp:
        raise OSError("torch has loaded no OpenMP runtime")
    ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
