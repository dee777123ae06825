"""A Jinja chat template, rendered in a separate process with limits on time, memory and files.

A template comes with a model from anywhere. A process bounds what no sandbox inside Python can: a loop without end, and
strings that fill the memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.chat.template_worker import CPU_SECONDS, MEMORY

WORKER = Path(__file__).with_name("template_worker.py")
WALL_SECONDS = 120.0
"""For a worker that waits instead of computing."""


class TemplateRefused(ValueError):
    """A template that raises an error for a conversation, or exceeds its limits."""


class TemplateProcess:
    """Renders one template. The process starts at the first call, and ends with this object."""

    def __init__(self, source: str, *, where: str) -> None:
        self.source, self.where = source, where
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def render(self, calls: Sequence[Mapping[str, Any]], now: str) -> list[str]:
        """Return the text of each call, whose variables are given; `now` is what `strftime_now` shows (ISO).

        Raises ValueError for a syntax error, and TemplateRefused if the template raises one or exceeds its limits.
        """
        with self._lock:
            if self._process is None or self._pid != os.getpid():  # after a fork, the pipes belong to the parent
                self._start()
            answers = self._ask([{"variables": dict(call), "now": now} for call in calls])
        for answer in answers:
            if "error" in answer:
                raise TemplateRefused(f"the chat template of {self.where} refuses: {_short(answer['error'])}")
        return [answer["text"] for answer in answers]

    def _start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT", "HOME") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=kept | {"PYTHONPATH": paths, "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C in a chat ends the reply, not the template
        )
        self._pid = os.getpid()
        weakref.finalize(self, _end, self._process)
        error = self._ask(self.source)
        if error is not None:
            self._stop()
            raise ValueError(f"the chat template of {self.where} {_short(error)}")

    def _ask(self, request: Any) -> Any:
        """Send a line and return the answer. Raises TemplateRefused if the process ends or hangs."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        began = time.monotonic()  # before the timer: what it kills has taken WALL_SECONDS
        timer = threading.Timer(WALL_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except BaseException:  # Ctrl-C: the next request would read the answer to this one
            self._process.kill()
            self._stop()
            raise
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._stop()
        if code == -signal.SIGXCPU or time.monotonic() - began >= WALL_SECONDS:
            reason = f"it takes more than {CPU_SECONDS} s"
        else:
            reason = f"its process ended (code {code}; it may use at most {MEMORY >> 20} MiB of memory)"
        raise TemplateRefused(f"the chat template of {self.where} refuses: {reason}")

    def _stop(self) -> int:
        """End the process and return its exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        if process.stdin is not None:
            process.stdin.close()
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process whose template is no longer used."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
    if process.poll() is None:
        process.kill()
        process.wait()


def _short(text: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else f"{line[:299]}…"
