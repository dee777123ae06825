"""`niels-gpt` and `python -m niels_gpt`: handle Ctrl-C from the first moment, then run the command line.

Half of a second may pass in imports, where a KeyboardInterrupt ends in a traceback, or is swallowed by a library.
"""

import gc
import os
import signal
from types import FrameType

_INTERRUPTED = 130  # `run_app.INTERRUPTED`; importing it here would take the time that this module is to cover


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in a job that ignores Ctrl-C
    if ours:
        signal.signal(signal.SIGINT, _interrupt)
    from niels_gpt.cli.main import main as run

    try:
        run(arguments)
    finally:
        gc.freeze()  # collecting torch's modules at exit would take a second
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to clean up: end at once


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Exit quietly if a module is being imported, and raise KeyboardInterrupt otherwise."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
