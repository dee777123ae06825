"""Runs `niels-gpt` commands in forked processes that read from a Hub at HF_ENDPOINT; started by `HubClient`.

The heavy modules are imported once, before the forks. Pauses are recorded and not waited for: `time.sleep` returns at
once, and `time.monotonic` advances by the pause.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    """Exit status; -9 after a SIGKILL."""
    stdout: str
    stderr: str
    pauses: list[float]
    """Seconds of all pauses longer than 0.5 s, in order."""


class HubClient:
    """A process that forks one child per command. Use as a context manager."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.folder = folder
        self._pid = 0
        self._started = threading.Event()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "NIELS_GPT_"))}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.hub_client"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, cwd=folder, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        """Process of the current command. A request of it can come before its number is known here."""
        assert self._started.wait(60)
        return self._pid

    def run(self, *arguments: object, download_timeout: int = 60) -> Outcome:
        """Run `niels-gpt ARGUMENTS` to its end; a download that stalls for so many seconds is tried again."""
        assert self.process.stdin and self.process.stdout
        self._started.clear()
        self.process.stdin.write(json.dumps([download_timeout, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        self._pid = int(self.process.stdout.readline())
        self._started.set()
        status = int(self.process.stdout.readline())
        texts = [(self.folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr", "pauses")]
        return Outcome(status, texts[0], texts[1], [float(line) for line in texts[2].split()])


def _serve() -> None:
    import datasets  # noqa: F401  (imported before the forks)
    import huggingface_hub.hf_file_system  # noqa: F401

    import niels_gpt.cache.sources.build  # noqa: F401
    import niels_gpt.cli.main  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(*json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _child(download_timeout: int, *arguments: str) -> None:
    """Run one command and exit."""
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT = download_timeout
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    _skip_pauses()
    sys.argv = ["niels-gpt", *arguments]
    status = 0
    try:
        from niels_gpt.cli.main import main

        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _skip_pauses() -> None:
    sleep, monotonic, skipped = time.sleep, time.monotonic, [0.0]
    log = Path("pauses").open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  (until the process ends)

    def short_sleep(seconds: float) -> None:
        if seconds <= 0.5:
            sleep(seconds)
            return
        log.write(f"{seconds}\n")
        skipped[0] += seconds

    time.sleep, time.monotonic = short_sleep, lambda: monotonic() + skipped[0]


if __name__ == "__main__":
    _serve()
