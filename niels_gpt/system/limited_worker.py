"""The loop of a process that computes for `LimitedProcess`, without files, network or much memory."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 1 << 30
CPU_SECONDS = 10


def answer_lines(answer: Callable[[Any], Any]) -> None:
    """Answer each line of the input by one line, both JSON, until it ends. Load what is needed before."""
    limit_process()
    for line in sys.stdin:
        limit_time()
        print(json.dumps(answer(json.loads(line))), flush=True)


def limit_process() -> None:
    """From now on no file or socket can be opened, no byte written to a file, and memory is limited."""
    for name, value in (
        ("RLIMIT_NOFILE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", MEMORY),
    ):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not on this system
            resource.setrlimit(getattr(resource, name), (value, value))


def limit_time() -> None:
    """Let the kernel end the process after CPU_SECONDS more seconds of computing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
