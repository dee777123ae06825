"""Files of others, a model or a tokenizer: checked before they are read, and computed with in a separate process.

Templates and tokenizers come with a model from anywhere. A process bounds what no check of the files can: a loop
without end, and strings that fill the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
CPU_SECONDS = 10
WALL_SECONDS = 120.0
"""For a worker that waits instead of computing."""


def is_untrusted_file(path: Path, most: int | None = None) -> bool:
    """Whether a file is there; most: how many bytes it may have.

    Raises ValueError for what is no regular file (a pipe would block for ever), for a link out of the folder (except to
    the blobs of a cache of the Hugging Face Hub), and for a file that is too large.
    """
    if not os.path.lexists(path):
        return False
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    inside = [folder]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        inside.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(each) for each in inside):
        raise ValueError(f"{path} is a link to a file outside its folder: replace it by a copy of that file")
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file: remove it, or copy the folder again")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes, more than {most:,}: it is not a {path.name}")
    return True


def read_untrusted(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file; None if there is none. Raises as `is_untrusted_file`."""
    return path.read_bytes() if is_untrusted_file(path, most) else None


class LimitExceeded(ValueError):
    """A process that has exceeded its limits, or crashed. The message is the reason."""


class LimitedProcess:
    """Runs a script that calls `answer_lines`, and ends with this object. One request at a time."""

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


# --- in that process ---------------------------------------------------------------------------------


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
