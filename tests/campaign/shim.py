"""Compile shim.c, and arm it in a forked child. The campaign itself runs under LD_PRELOAD with the shim disarmed."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

CALLS = (
    "open", "read", "write", "fsync", "rename", "mkdir", "unlink", "mmap", "link", "truncate", "lock", "stat",
)  # fmt: skip
"""The kinds of system calls, in the order of the enum in shim.c."""
EVENTS = len(CALLS)
"""As a kind: the n-th event of the log."""
ACTIONS = ("nothing", "fail", "fail_from", "shorten", "kill_before", "kill_after")


class Fault(NamedTuple):
    """What happens at the n-th call of a kind on a path under the folder of the case."""

    call: str | None = None
    """A name in CALLS, `event` for the events of the log, or None: only count."""
    number: int = 0
    action: str = "nothing"
    error: int = 0
    log: str = ""
    """Folder for the log of a power cut."""
    counters: str = ""
    """File that receives the counters."""


def compile_shim(folder: Path) -> Path | None:
    """Return the compiled shim, or None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    target = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl", "-lpthread"], check=True, timeout=120
    )
    return target


def loaded() -> bool:
    """Whether this process runs under the shim."""
    return hasattr(ctypes.CDLL(None), "campaign_arm")


def arm(folder: Path, fault: Fault) -> None:
    """Start counting and disturbing in this process, for paths under the folder."""
    library = ctypes.CDLL(None)
    kind = -1 if fault.call is None else EVENTS if fault.call == "event" else CALLS.index(fault.call)
    action = ACTIONS.index(fault.action)
    log = os.fsencode(fault.log)
    library.campaign_arm(os.fsencode(folder), kind, ctypes.c_long(fault.number), action, fault.error, log)
    if fault.counters:
        library.campaign_share(os.fsencode(fault.counters))


def read_counters(path: Path) -> dict[str, int]:
    """Return how often each kind of call was counted, and the number of events."""
    numbers = struct.unpack(f"{len(CALLS) + 1}l", path.read_bytes())
    return dict(zip((*CALLS, "event"), numbers, strict=True))
