"""How to start this program from the user's shell: every command that is printed works as printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

NAME = "niels-gpt"

_arguments: tuple[str, ...] | None = None
"""The words after the name of the program; None in a process that is not a command of this program."""


def set_arguments(arguments: Sequence[str]) -> None:
    """Remember the words that this process was started with, for `command_line`."""
    global _arguments
    _arguments = tuple(arguments)


def command_line() -> str | None:
    """Return the command that this process runs, quoted for the shell; None if it was not started as a command."""
    return None if _arguments is None else command(*_arguments)


def command(*words: str | Path) -> str:
    """Return a command line of this program, quoted for the shell: `command("chat", run.path)`."""
    return " ".join([program(), *(shlex.quote(str(word)) for word in words)])


def program() -> str:
    """Return what starts this program from the current folder, quoted for the shell.

    `niels-gpt` if that is this installation on the PATH; else the path of the script that was started, relative to
    the current folder if it is inside (`.venv/bin/niels-gpt`); else `PYTHON -m niels_gpt`.
    """
    started = Path(sys.argv[0]) if sys.argv and Path(sys.argv[0]).name == NAME else None
    on_path = shutil.which(NAME)
    ours = [path for path in (started, Path(sysconfig.get_path("scripts"), NAME)) if path is not None]
    if on_path is not None and any(_same_file(on_path, path) for path in ours):
        return NAME
    if started is not None and started.is_file():
        return shlex.quote(_short(started))
    return f"{_interpreter()} -m niels_gpt"


def _interpreter() -> str:
    """Return `python` or `python3` if that is this interpreter on the PATH, else its path, quoted for the shell."""
    executable = sys.executable or "python3"
    for name in ("python", "python3"):
        found = shutil.which(name)
        # Not samefile: the python of every virtual environment is a link to the same interpreter.
        if found is not None and os.path.abspath(found) == os.path.abspath(executable):  # noqa: PTH100 (keeps links)
            return name
    return shlex.quote(_short(Path(executable)))


def _short(path: Path) -> str:
    """Return a path relative to the current folder if it is inside, else as an absolute path; links are kept."""
    absolute, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100
    if not absolute.is_relative_to(here):
        return str(absolute)
    relative = absolute.relative_to(here)
    return str(relative) if len(relative.parts) > 1 else f"./{relative}"


def _same_file(first: str | Path, second: str | Path) -> bool:
    try:
        return os.path.samefile(first, second)  # noqa: PTH121
    except OSError:
        return False
