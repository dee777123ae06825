"""Name the file when a process dies of SIGBUS because a mapped file was truncated.

Reading a mapped page past the end of its file raises SIGBUS, which no Python handler can catch: Python runs handlers
after the instruction, and this instruction never ends. So libc calls this handler directly. It prints one line and
ends the process. If no file was truncated, the signal has another cause and goes to the previous handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

_installed: list[Any] = []


def install_handler(describe: Callable[[], str | None]) -> None:
    """Print what `describe` returns if a SIGBUS arrives and it is not None. Only the first call has an effect."""
    if _installed or os.name != "posix":
        return
    try:
        set_handler = ctypes.CDLL(None).signal
    except (OSError, AttributeError):  # no libc that Python can load: the process dies without the line
        return
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        message = None
        with contextlib.suppress(Exception):
            message = describe()
        if message is None:
            set_handler(number, previous)  # the instruction runs again, and the signal arrives there
            return
        os.write(2, f"error: {message}\n".encode("utf-8", "backslashreplace"))
        os._exit(1)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    _installed.append(callback)  # the address is used until the process ends
    previous = set_handler(signal.SIGBUS, ctypes.cast(callback, ctypes.c_void_p))
