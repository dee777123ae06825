"""Start-up time: wall time of new processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.case import Case, Contender, Work

COMMAND = str(Path(sys.executable).with_name("niels-gpt"))


def _work(quick: bool, *command: str) -> Work:
    times = 1 if quick else 5
    return Work(lambda: [subprocess.run(command, check=True, stdout=subprocess.DEVNULL) for _ in range(times)], times)


BARE = Contender("bare python", lambda quick: _work(quick, sys.executable, "-c", "pass"), role="baseline")
IMPORT = Contender(
    "import niels_gpt, net",
    lambda quick: _work(quick, sys.executable, "-c", "import niels_gpt"),
    role="ours",
    minus=BARE.name,
    target=50,
)
HELP = Contender("niels-gpt --help", lambda quick: _work(quick, COMMAND, "--help"), role="ours", target=300)
CASE = Case("startup", "ms", (BARE, IMPORT, HELP))
