"""Compute what files of others ask for in a separate process with limits on time, memory and files.

Templates and tokenizers come with a model from anywhere. A process bounds what no check of the files can: a loop
without end, and strings that fill the memory.
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
from pathlib import Path
from typing import Any

from niels_gpt.system.limited_worker import CPU_SECONDS, MEMORY

WALL_SECONDS = 120.0
"""For a worker that waits instead of computing."""


class LimitExceeded(ValueError):
    """A process that has exceeded its limits, or crashed. The message is the reason."""


class LimitedProcess:
    """Runs a script that calls `limited_worker.answer_lines`, and ends with this object. One request at a time."""

    def __init__(self, worker: Path, *arguments: str) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT", "HOME") if name in os.environ}
        kept |= {"PYTHONPATH": paths, "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(worker), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=kept | {"TOKENIZERS_PARALLELISM": "false"},  # no thread can be started
            start_new_session=True,  # Ctrl-C in a chat ends the reply, not the template
        )
        self._pid = os.getpid()
        weakref.finalize(self, _end, self.process, self._pid)

    @property
    def usable(self) -> bool:
        """Whether it has not ended, and belongs to this process: after a fork, the pipes belong to the parent."""
        return self.process.returncode is None and self._pid == os.getpid()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request. Raises LimitExceeded if the process ends or hangs; then it has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        began = time.monotonic()  # before the timer: what it kills has taken WALL_SECONDS
        timer = threading.Timer(WALL_SECONDS, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except BaseException:  # Ctrl-C: the next request would read the answer to this one
            self.process.kill()
            self.stop()
            raise
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.stop()
        if code == -signal.SIGXCPU or time.monotonic() - began >= WALL_SECONDS:
            raise LimitExceeded(f"it takes more than {CPU_SECONDS} s")
        raise LimitExceeded(f"its process ended (code {code}; it may use at most {MEMORY >> 20} MiB of memory)")

    def stop(self) -> int:
        """End the process and return its exit code."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process that is no longer used, unless this is a fork of its owner."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
    if process.poll() is None:
        process.kill()
        process.wait()
