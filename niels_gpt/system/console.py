"""Text for the user: hints, errors as one line, formatted numbers."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from niels_gpt.system import files, host_limits, terminal

_quiet = False
_VERBOSE = "niels-gpt --verbose"
"""Name of the log handler of --verbose."""


def set_quiet(quiet: bool) -> None:
    """Print results and errors only (--quiet), or progress and hints too."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Whether --quiet was given."""
    return _quiet


def set_verbose(verbose: bool) -> None:
    """Print the log of the package (details of the data) on stderr, or only its warnings."""
    logger = logging.getLogger("niels_gpt")
    logger.handlers = [handler for handler in logger.handlers if handler.get_name() != _VERBOSE]
    logger.setLevel(logging.INFO if verbose else logging.NOTSET)
    logger.propagate = not verbose
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
        handler.set_name(_VERBOSE)
        logger.addHandler(handler)


def hint(text: str) -> None:
    """Print a line that no result needs (which run is used, what to type next) on stderr, unless --quiet was given."""
    if not _quiet:
        print(text, file=sys.stderr, flush=True)


class OtherProcessFailed(Exception):
    """Another process of this run failed and reports the error; this one exits with code 1 and no message."""


def one_line(text: str) -> str:
    """Return a message that may quote names and texts of any kind as one line, without control characters."""
    return terminal.neutralize(text).replace("\n", "\\n")


def error_message(err: BaseException) -> str:
    """Return an error as one line; errors of the system get a remedy."""
    exhausted = host_limits.describe_limit_error(err)
    if exhausted is not None:
        return exhausted
    if isinstance(err, RecursionError):
        return "something that was read is nested too deeply; NIELS_GPT_DEBUG=1 shows where"
    if isinstance(err, OSError) and err.errno == errno.EBADF and err.filename is None:
        return "stdout is closed"
    return files.describe_os_error(err) + host_limits.open_files_remedy(err) if isinstance(err, OSError) else str(err)


@contextlib.contextmanager
def optional_write(path: Path, *other_errors: type[Exception]) -> Iterator[None]:
    """Turn an OSError (or one of `other_errors`) of the block, which writes `path`, into a warning of one line."""
    expected: tuple[type[Exception], ...] = (OSError, *other_errors)
    try:
        yield
    except expected as err:
        warnings.warn(one_line(f"{path} was not written: {error_message(err)}"), stacklevel=1)


def remove_folder(path: Path, *, consequence: str) -> None:
    """Remove a folder and what is in it; warn, with the consequence, if a part of it stays."""
    problems: list[str] = []

    def note(_function: object, _path: str, reason: tuple[type[BaseException], BaseException, object]) -> None:
        problems.append(error_message(reason[1]))

    shutil.rmtree(path, onerror=note)
    if problems and path.exists():
        warnings.warn(one_line(f"cannot remove {path}: {problems[0]}; {consequence}"), stacklevel=1)


def short_number(number: float) -> str:
    """Format a number with three digits and a unit: 12.3k, 4.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds as 0:41, 3:07 or 1:12:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plural(number: int, what: str) -> str:
    """Format a count with its noun: 1 window, 1,200 windows."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Format the first names, and how many follow: a, b and 3 more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
