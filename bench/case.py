"""What a benchmark is: a case, its contenders, and the work of one round."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

USUAL = (
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
    "stall",
    "memory",
)
"""What `python -m bench` runs on a CPU."""
ON_CUDA = (
    "train_step",
    "train_step_v1",
    "train_step_124m",
    "generate",
    "generate_v1",
    "generate_cold",
    "stall",
    "memory",
    "memory_v1",
    "memory_124m",
    "muon",
    "shakespeare",
)
"""What there is for a GPU. All of it runs on a CPU too; what is not among the usual takes long there."""
NAMES = (*USUAL, *(name for name in ON_CUDA if name not in USUAL))
Role = Literal["ours", "peer", "baseline", "peak"]
HIGHER = ("tokens/s", "% MFU", "x alone")
"""The units of which more is better."""


class NotHere(Exception):
    """This machine lacks what a contender needs, and it says what."""


@dataclass(frozen=True)
class Work:
    """One round of a contender, ready to run."""

    run: Callable[[], object]
    amount: float = 1.0  # units of the case (calls, tokens) in a round
    gflop: float | None = None  # 10^9 floating-point operations in a round, to set against the peak
    facts: dict[str, object] = field(default_factory=dict)  # goes into the JSON
    measures: bool = False  # run returns what it measured, by unit; "seconds" is then the part of its time that counts
    warm: bool = True  # run once before the first round


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case."""

    name: str
    build: Callable[[bool], Work]  # called in the contender's own process, with True for tiny sizes
    role: Role = "peer"
    group: str = ""  # ratios are to the best peer of the group
    minus: str | None = None  # the baseline that is subtracted, round by round
    target: float | None = None  # the least ratio where the group has peers, else the largest median
    alone: str | None = None  # the contender that does it one at a time: "x alone" is what many together gain
    goals: Mapping[str, str] = field(default_factory=dict)  # unit -> "≥ 55", "≤ 2", or as a ratio "≥ 1.3x"


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work, measured in ms per unit of it, in units of it per second, or by themselves."""

    name: str
    unit: Literal["ms", "tokens/s", "s", "GiB"]
    contenders: tuple[Contender, ...]
    device: str = "cpu"
    rounds: int = 9  # unless others are asked for
    starts: int = 1  # contenders that get ready at the same time
    fresh: bool = False  # every round in a new process


def load_case(name: str, device: str = "cpu") -> Case:
    """The case of that name in bench.cases, in its form for a device; a dotted name is any module with a CASE.

    A module has a CASE, or CASES: one case in several sizes (train_step, train_step_v1), and for several devices.
    Raises ValueError where there is none for the device.
    """
    module = importlib.import_module(
        name if "." in name else f"bench.cases.{name.removesuffix('_v1').removesuffix('_124m')}"
    )
    cases: tuple[Case, ...] = getattr(module, "CASES", ()) or (module.CASE,)
    found = [case for case in cases if case.device == device and ("." in name or case.name == name)]
    if not found:
        raise ValueError(f"the case {name} does not run on {device}; those that do: {', '.join(ON_CUDA)}")
    return found[0]
