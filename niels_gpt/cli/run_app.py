"""Run a command line: prepare the process, print errors as one line, exit with a code that says what happened."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from niels_gpt.system import files, host_limits, program, terminal
from niels_gpt.system.console import OtherProcessFailed, error_message, one_line, set_quiet, set_verbose

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def run_app(app: Callable[..., Any], arguments: list[str] | None, *, name: str) -> None:
    """Run a command line. Exit codes: 0, 1 (error), 2 (usage), 3 (partly done), 130 (interrupted).

    A ValueError, OSError, ArithmeticError or error of memory or threads is a message to the user: it is printed as one
    line on stderr (NIELS_GPT_DEBUG=1 shows the traceback). If the error (or KeyboardInterrupt) has the attribute
    `leave_at_once`, the process exits without clean-up. Any other exception is a bug and keeps its traceback.
    """
    import warnings

    host_limits.prepare_process()
    set_quiet(False)
    set_verbose(False)
    # On a busy machine, OpenMP threads that spin while they wait for each other can take ten times as long. After 1000
    # spins they sleep instead, which costs nothing on an idle machine. torch reads this when it loads.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # On ARM torch uses mimalloc, which returns freed memory after 10 ms: 12,000 page faults per step of the demo, and
    # 7 % of its time. Keep the memory, as `host_limits.keep_freed_memory` does for glibc.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may contain any byte
    if sys.stdout is None:  # the parent process closed it: what is written fails, as for a full disk
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    arguments = [_expand_home_in(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    program.set_arguments(arguments)
    with terminal.neutralized_terminal():
        _run(app, arguments, name)


def _run(app: Callable[..., Any], arguments: list[str], name: str) -> None:
    try:
        _check_values(arguments)
        app(args=arguments, prog_name=name)
    except OtherProcessFailed:
        sys.exit(1)
    except (ValueError, OSError, ArithmeticError, MemoryError, RuntimeError, ImportError, SystemError) as err:
        if os.environ.get("NIELS_GPT_DEBUG") or not _is_for_the_user(err):
            raise
        print(f"error: {one_line(error_message(err))}", file=sys.stderr)
        _leave_at_once_after(err, 1)
        _flush_output(report=False)
        sys.exit(1)
    except KeyboardInterrupt:  # before or after what click runs
        sys.exit(INTERRUPTED)
    except SystemExit as err:
        if err.code == INTERRUPTED:
            _leave_at_once_after(err, INTERRUPTED)
        _flush_output()
        raise


def _flush_output(*, report: bool = True) -> None:
    """Write what is left in the buffer of stdout. A full disk may show only now: exit with 1, and an error line.

    report: false after another error.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader is gone; Python ends quietly
    except OSError as err:
        if report:
            print(f"error: cannot write the output: {error_message(err)}", file=sys.stderr)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())  # Python flushes again when it exits
        os.close(devnull)
        sys.exit(1)


def _is_for_the_user(err: Exception) -> bool:
    """Whether an error is a message to the user, and no bug."""
    expected = isinstance(err, ValueError | OSError | ArithmeticError | RecursionError)
    return expected or host_limits.describe_limit_error(err) is not None


def _leave_at_once_after(err: BaseException, code: int) -> None:
    """Exit without clean-up if an error that led to this one asks for it."""
    reason: BaseException | None = err
    while reason is not None:
        if getattr(reason, "leave_at_once", False):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        reason = reason.__cause__ or reason.__context__


def _expand_home_in(word: str) -> str:
    """Expand the ~ of --run-dir=~/x: the shell does not expand a ~ after an equals sign."""
    option, _, value = word.partition("=")
    return f"{option}={files.expand_home(value)}" if option.startswith("--") and value.startswith("~/") else word


def _check_values(arguments: list[str]) -> None:
    """Raise ValueError for an option with an empty value.

    As a path it would mean the working directory, but `--roam "$NOTES"` usually means that NOTES is not set.
    """
    words = list(itertools.takewhile(lambda word: word != "--", arguments))
    for word, following in itertools.zip_longest(words, words[1:]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and (value if equals else following) == "":
            raise ValueError(f"the value of {option} is empty: give a value, or omit {option}")
