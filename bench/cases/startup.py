"""What a user waits for before anything happens: the import, and the help of the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.case import Case, Contender, Work


def _work(*command: str) -> Work:
    return Work(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def _help(quick: bool) -> Work:
    return _work(str(Path(sys.executable).with_name("niels-gpt")), "--help")


CASE = Case(
    "startup",
    "wall time of a fresh process",
    "ms",
    (
        Contender("python alone", lambda quick: _work(sys.executable, "-c", "pass"), role="baseline"),
        Contender(
            "import niels_gpt, less python alone",
            lambda quick: _work(sys.executable, "-c", "import niels_gpt"),
            role="ours",
            minus="python alone",
            at_most=50,
        ),
        Contender("niels-gpt --help", _help, role="ours", at_most=300),
    ),
)
