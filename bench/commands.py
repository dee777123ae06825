"""Time and memory of a niels-gpt command in a new process, for the cases import_hf and export."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.case import Unavailable


class Finished(NamedTuple):
    """A command that has ended."""

    seconds: float
    peak_bytes: int
    """Largest resident size, of its mapped files too."""


def require(*words: str) -> None:
    """Raise Unavailable if there is no such command."""
    command = [sys.executable, "-m", "niels_gpt", *words, "--help"]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        raise Unavailable(f"this version has no niels-gpt {' '.join(words)}")


def run(arguments: Sequence[str]) -> Finished:
    """Run niels-gpt with these arguments. Raises RuntimeError with the last line of its errors if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "niels_gpt", *arguments], stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError((errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return Finished(seconds, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
