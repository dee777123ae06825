"""Files that a command can do without: if one cannot be written or removed, a warning is printed."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.system.console import error_message, one_line


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
