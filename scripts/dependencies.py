"""The installed distributions that this project requires, directly or through others."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class Closure(NamedTuple):
    """What is required, by canonical name."""

    found: dict[str, Distribution]
    requires: dict[str, list[str]]
    """Distribution -> the distributions that it requires here; "" is the project."""
    missing: list[str]
    """Required, but not installed."""


SETUP_EXTRAS = ("dev", "serve")
"""The extras that `make setup` installs; the others have separate environments."""


def own_requirements(extras: Iterable[str] | None = None, pyproject: Path = PYPROJECT) -> list[str]:
    """Return the requirements of pyproject.toml, with those of these extras; None: those of `make setup`."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    chosen = {extra: optional[extra] for extra in (SETUP_EXTRAS if extras is None else extras)}
    return [*project["dependencies"], *(text for texts in chosen.values() for text in texts)]


def closure(requirements: Iterable[str]) -> Closure:
    """Return all distributions that these requirements lead to on this machine."""
    result = Closure({}, {"": []}, [])
    seen: set[tuple[str, str]] = set()
    waiting = [("", Requirement(text), "") for text in requirements]
    while waiting:
        parent, requirement, parent_extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in result.requires[parent]:
            result.requires[parent].append(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                result.found[name] = distribution(name)
            except PackageNotFoundError:
                if name not in result.missing:
                    result.missing.append(name)
                continue
            result.requires.setdefault(name, [])
            waiting += [(name, Requirement(text), extra) for text in result.found[name].requires or ()]
    return Closure(dict(sorted(result.found.items())), result.requires, sorted(result.missing))
