"""What a benchmark is: a case, its contenders, and the work of one round."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

NAMES = ("get_batch", "train_step", "generate", "startup")
"""All cases, in the order of the table; each is a module of bench.cases."""


@dataclass(frozen=True)
class Work:
    """One round of one contender, ready to run."""

    run: Callable[[], object]
    """What is timed."""
    amount: float = 1.0
    """How many units of the case (tokens, calls) one round does."""
    gflop: float | None = None
    """What one round costs in 10^9 floating-point operations, where that is known."""
    facts: dict[str, object] = field(default_factory=dict)
    """What else belongs in the results, e.g. the number of parameters."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case."""

    name: str
    build: Callable[[bool], Work]
    """Called in the contender's own process, with True for tiny sizes; imports what it needs itself."""
    role: Literal["ours", "peer", "peak", "baseline"] = "peer"
    """Ours is compared with peers; a peak is what the machine can do; a baseline is there to be subtracted."""
    group: str = ""
    """Ratios are taken within a group: to its fastest peer."""
    needs: str | None = None
    """The package without which this contender is reported as not installed."""
    minus: str | None = None
    """The baseline whose seconds are subtracted, round by round."""
    at_least: float | None = None
    """Target: the ratio to the fastest peer."""
    at_most: float | None = None
    """Target: the median, in the unit of the case."""


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work."""

    name: str
    what: str
    """The work, in one line."""
    unit: Literal["ms", "tokens/s"]
    """Of the medians: milliseconds per unit of work, or units of work per second."""
    contenders: tuple[Contender, ...]

    def __getitem__(self, name: str) -> Contender:
        """The contender of that name; KeyError where there is none."""
        for contender in self.contenders:
            if contender.name == name:
                return contender
        raise KeyError(f"case {self.name} has no contender {name!r}")


def load_case(name: str) -> Case:
    """The case of that name; a dotted name is any module with a CASE."""
    case: Case = importlib.import_module(name if "." in name else f"bench.cases.{name}").CASE
    return case
