"""Where the peers are installed: one environment for each set of packages that can be installed together.

litgpt requires numpy < 2, which breaks the pyarrow that datasets, and with it TRL, needs. `make bench-peers` therefore
creates two environments, `make test WHAT=levanter` one with JAX, and `make test WHAT=gguf` one with llama.cpp; a
contender runs in the one that has its package.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {
    "transformers": ".venv-peers",
    "trl": ".venv-peers",
    "litgpt": ".venv-peers-litgpt",
    "levanter": ".venv-levanter",
    "llama_cpp": ".venv-gguf",
}
"""Package, as it is imported -> folder of its environment, as in the Makefile."""
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python"}
"""Package -> the name that pip installs it by, if it is another one."""


def environment_of(package: str) -> Path | None:
    """Return the environment to run a package in; None is the current one.

    The current environment is used if it has the package, or if the other one does not exist: then the contender
    reports that the package is not installed.
    """
    if package not in ENVIRONMENTS or importlib.util.find_spec(package) is not None:
        return None
    folder = ROOT / ENVIRONMENTS[package]
    return folder if (folder / "bin" / "python").exists() else None


def python_of(package: str) -> str:
    """Return the interpreter to run a package with."""
    folder = environment_of(package)
    return sys.executable if folder is None else str(folder / "bin" / "python")


def version_of(package: str) -> str | None:
    """Return the version of a package in the environment it runs in; None if it is not installed."""
    folder = environment_of(package)
    path = sys.path if folder is None else [str(p) for p in folder.glob("lib/python*/site-packages")]
    found = next(iter(metadata.distributions(name=DISTRIBUTIONS.get(package, package), path=path)), None)
    return None if found is None else found.version
