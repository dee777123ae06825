"""Run a command in a forked child of this process, which has torch loaded: several commands a second."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 90.0
"""Seconds after which a command counts as hanging."""
MEMORY = 4 << 30
"""Most bytes of resident memory above those of the campaign itself."""


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    """The exit code; -N: killed by signal N."""
    out: str
    err: str
    seconds: float
    memory: int
    """Peak resident memory, in bytes."""
    hung: bool = False


class Running:
    """A command in a forked child, with its process group."""

    def __init__(
        self,
        work: Callable[[], None],
        folder: Path,
        output: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        before: Callable[[], None] | None = None,
    ) -> None:
        """`output` is a path prefix for stdout, stderr and stdin. `before` runs in the child, just before the work."""
        self._paths = [output.with_name(f"{output.name}.{name}") for name in ("in", "out", "err")]
        self._paths[0].write_bytes(stdin)
        self._began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(work, folder, environment or {}, before)
        self._handle = os.pidfd_open(self.pid)
        self._ended: Outcome | None = None

    def _child(
        self, work: Callable[[], None], folder: Path, environment: Mapping[str, str], before: Callable[[], None] | None
    ) -> None:
        code = 70
        try:
            os.setpgid(0, 0)
            modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, (path, mode) in enumerate(zip(self._paths, modes, strict=True)):
                os.dup2(os.open(path, mode, 0o600), number)
            for stream, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
                setattr(sys, stream, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
            for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                default = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
                signal.signal(signal_number, default)
            os.environ.update(environment)
            os.chdir(folder)
            sys.argv = ["niels-gpt"]
            if before is not None:
                before()
            work()
            code = 0
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else 0 if err.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    @property
    def outputs(self) -> list[Path]:
        """The files of its stdout and stderr."""
        return self._paths[1:]

    def wait(self, seconds: float | None = None) -> Outcome | None:
        """Return the outcome, or None if the command still runs after the seconds. Without a limit: kill it then."""
        if self._ended is not None:
            return self._ended
        limit = TIMEOUT if seconds is None else seconds
        ready, _, _ = select.select([self._handle], [], [], max(limit, 0))
        hung = not ready
        if hung and seconds is not None:
            return None
        if hung:
            self.signal(signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self._handle)
        self.signal(signal.SIGKILL)  # workers that it left behind
        out, err = (path.read_bytes().decode("utf-8", "replace") for path in self._paths[1:])
        seconds_run = time.monotonic() - self._began
        code = os.waitstatus_to_exitcode(status)
        self._ended = Outcome(code, out, err, seconds_run, usage.ru_maxrss * 1024, hung)
        return self._ended

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, number)
                return
            except (ProcessLookupError, PermissionError):
                continue


def limited(kind: int, value: int) -> Callable[[], None]:
    """Return a function that sets a resource limit in the child."""
    return lambda: resource.setrlimit(kind, (value, value))


def command_line(*arguments: str, modules: Path | None = None) -> Callable[[], None]:
    """Return the work of a child: `niels-gpt ARGUMENTS`. `modules`: a file that receives what it has imported."""

    def work() -> None:
        from niels_gpt.cli.main import main

        try:
            main(list(arguments))
        finally:
            if modules is not None:
                modules.write_text("\n".join(sys.modules), encoding="utf-8")

    return work


def import_modules(file: Path) -> None:
    """Import what a child imported, so that the next one need not."""
    for name in file.read_text(encoding="utf-8").splitlines():
        if name not in sys.modules and not name.startswith(("__main__", "triton")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def warm_up() -> None:
    """Import what is large, once, before the first fork. It must not start threads."""
    for name in (
        "torch", "numpy", "matplotlib.figure", "matplotlib.backends.backend_agg", "sentencepiece", "datasets",
        "pyarrow.parquet", "torch.distributed.checkpoint", "niels_gpt.cli.main", "niels_gpt.training.loop",
    ):  # fmt: skip
        importlib.import_module(name)
