"""What a benchmark is: a case, its contenders, and the work of one round."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

NAMES = (
    "get_batch",
    "train_step",
    "muon",
    "generate",
    "loaders",
    "startup",
    "pretrain_batch",
    "sft_batch",
    "build_cache",
    "open_cache",
    "splice_batch",
    "open_splice",
    "packed_step",
    "memorise",
)


@dataclass(frozen=True)
class Work:
    """One round of a contender, ready to run."""

    run: Callable[[], object]
    amount: float = 1.0  # units of the case (calls, tokens) in a round
    gflop: float | None = None  # 10^9 floating-point operations in a round, to set against the peak
    facts: dict[str, object] = field(default_factory=dict)  # goes into the JSON


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case."""

    name: str
    build: Callable[[bool], Work]  # called in the contender's own process, with True for tiny sizes
    role: Literal["ours", "peer", "baseline", "peak"] = "peer"
    group: str = ""  # ratios are to the fastest peer of the group
    minus: str | None = None  # the baseline that is subtracted, round by round
    target: float | None = None  # the least ratio where the group has peers, else the largest median


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work, measured in ms per unit of it or in units per second."""

    name: str
    unit: Literal["ms", "tokens/s"]
    contenders: tuple[Contender, ...]


def load_case(name: str) -> Case:
    """The case of that name in bench.cases; a dotted name is any module with a CASE."""
    case: Case = importlib.import_module(name if "." in name else f"bench.cases.{name}").CASE
    return case
