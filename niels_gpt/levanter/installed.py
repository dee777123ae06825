"""Whether the installed Levanter is the one that this package is written for. Imports neither Levanter nor JAX."""

from __future__ import annotations

import sys
from importlib import metadata, util

INSTALL = "pip install 'niels-gpt[levanter]'"
DISTRIBUTION = "marin-levanter"
"""Where the present generation comes from; the distribution `levanter` holds older ones under the same module names."""
GENERATION = (0, 2, 20)
"""The release whose classes this package subclasses; releases of 0.2 from this one on are accepted."""


class LevanterUnavailable(ImportError):
    """Levanter is not installed, or it is of another generation."""

    def __init__(self, message: str) -> None:
        # With the name of the package, `python -m niels_gpt.levanter.train_lm` prints the message without a traceback.
        super().__init__(message, name="niels_gpt.levanter")


def check_levanter() -> None:
    """Raise LevanterUnavailable, with what to type, if Levanter cannot be used."""
    installed = _version(DISTRIBUTION)
    older = _version("levanter")
    if older is not None:
        raise LevanterUnavailable(
            f"niels_gpt.levanter does not work with levanter {older}, an older generation under the same name: remove "
            f"it (pip uninstall levanter haliax ray), then {INSTALL}"
        )
    if installed is None:
        present = util.find_spec("levanter") is not None
        what = "a levanter of unknown version is installed" if present else "Levanter is not installed"
        python = "; it needs a Python below 3.13" if sys.version_info >= (3, 13) else ""
        raise LevanterUnavailable(f"niels_gpt.levanter needs {DISTRIBUTION}, but {what}: {INSTALL}{python}")
    if not GENERATION <= _release(installed) < (0, 3):
        wanted = ".".join(map(str, GENERATION))
        raise LevanterUnavailable(
            f"niels_gpt.levanter needs {DISTRIBUTION} {wanted} or a later 0.2, but {installed} is installed: {INSTALL}"
        )
    if util.find_spec("git") is None:
        raise LevanterUnavailable(f"{DISTRIBUTION} imports gitpython, which is not installed: {INSTALL}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 2, 20) of 0.2.20.dev1."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
