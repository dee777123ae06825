"""End a command that a signal stops with a line about how to resume it, whatever the command does at that moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from niels_gpt.system.console import hint
from niels_gpt.system.terminal import show_cursor

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def resumable(resume_command: Callable[[], str]) -> Iterator[None]:
    """Print how to resume, and exit with 128 + the signal, if SIGINT, SIGTERM or SIGHUP arrives in the block.

    The block gets a KeyboardInterrupt, as after Ctrl-C; a second signal ends the process at once. A signal that is
    ignored stays ignored: shells without job control start background jobs (`command &`) with SIGINT ignored, which is
    reported. Training has its own handlers, which save first. Not for threads other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[signal.Signals] = []

    def explain(number: signal.Signals) -> None:
        print(f"{number.name}: stopped. Resume with\n  {resume_command()}", flush=True)

    def leave(number: int) -> None:
        show_cursor()
        os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            leave(number)
        received.append(signal.Signals(number))
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # libraries swallow it there
                explain(received[0])
                leave(number)
            frame = frame.f_back
        raise KeyboardInterrupt

    wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    if signal.SIGINT not in wanted:
        hint(f"Ctrl-C and SIGINT are ignored in this background job: `kill {os.getpid()}` stops it")
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    except KeyboardInterrupt:
        number = received[0] if received else signal.SIGINT
        explain(number)
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
