"""What all commands share: errors as one line, numbers as people read them."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from niels_gpt.system import files


class OtherProcessFailed(Exception):
    """Another process of this run failed and reports the error; this one exits with code 1 and no message."""


def run_app(app: Callable[..., Any], arguments: list[str] | None, *, name: str) -> None:
    """Run a command line; exits with 0, 1 (something is wrong), 2 (usage), 3 (done in part) or 130 (interrupted).

    A ValueError, OSError or ArithmeticError is a message to the user: one line on stderr (NIELS_GPT_DEBUG=1 shows the
    traceback); after one that says `leave_at_once` nothing is tidied up. Anything else is our bug and keeps its
    traceback.
    """
    import warnings

    # On a busy machine two OpenMP threads that spin for each other can take ten times as long; after 1000
    # turns they sleep instead, which costs nothing on a quiet one. Read when torch loads, so set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # On ARM torch brings mimalloc, which gives freed memory back after 10 ms: 12,000 page faults in an update of the
    # demo, and 7% of its time. As `memory.keep_freed_memory` does with glibc: it stays.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be anything
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by who started us
            setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    arguments = [_at_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        _check_values(arguments)
        app(args=arguments, prog_name=name)
    except OtherProcessFailed:
        sys.exit(1)
    except (ValueError, OSError, ArithmeticError) as err:
        if os.environ.get("NIELS_GPT_DEBUG"):
            raise
        print(f"error: {error_message(err)}", file=sys.stderr)
        if any(getattr(reason, "leave_at_once", False) for reason in (err, err.__cause__)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)


def _at_home(word: str) -> str:
    """--run-dir=~/x as the shell would have it: it leaves a ~ that follows a sign."""
    option, _, value = word.partition("=")
    return f"{option}={files.expand_home(value)}" if option.startswith("--") and value.startswith("~/") else word


def _check_values(arguments: list[str]) -> None:
    """Raise ValueError for an option whose value is empty: as a path that would be the folder one is in, though
    `--roam "$NOTES"` rather means that there is no such variable."""
    words = list(itertools.takewhile(lambda word: word != "--", arguments))
    for word, following in itertools.zip_longest(words, words[1:]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and (value if equals else following) == "":
            raise ValueError(f"the value of {option} is empty: give one, or leave {option} out")


def error_message(err: BaseException) -> str:
    """What an error says in one line; one of the system with what to do about it."""
    return files.describe_os_error(err) if isinstance(err, OSError) else str(err)


def short_number(number: float) -> str:
    """12.3k, 4.5M: a number as a person reads it."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """0:41, 3:07, 1:12:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plural(number: int, what: str) -> str:
    """1 window, 1,200 windows."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
