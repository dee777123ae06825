"""A benchmark: a case, its contenders, and the work of one round."""

from __future__ import annotations

import atexit
import importlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ON_CPU = (
    "get_batch",
    "train_step",
    "muon",
    "generate",
    "conversation",
    "loaders",
    "startup",
    "pretrain_batch",
    "checked_batch",
    "sft_batch",
    "build_cache",
    "open_cache",
    "splice_batch",
    "open_splice",
    "levanter_batch",
    "packed_step",
    "memorize",
    "stall",
    "memory",
    "serve",
    "serve_first_token",
    "serve_turns",
    "pretrained_train",
    "pretrained_decode",
    "lora_step",
    "import_hf",
    "export",
)
"""Default cases on a CPU."""
ON_CUDA = (
    "train_step",
    "train_step_v1",
    "train_step_124m",
    "generate",
    "generate_v1",
    "generate_cold",
    "conversation",
    "conversation_v1",
    "stall",
    "memory",
    "memory_v1",
    "memory_124m",
    "muon",
    "shakespeare",
    "serve_v1",
    "pretrained_train",
    "pretrained_decode",
    "lora_step",
    "import_hf_1b",
)
"""Default cases on a GPU. All of them run on a CPU too; those that are not in ON_CPU take long there."""
NAMES = (*ON_CPU, *(name for name in ON_CUDA if name not in ON_CPU))
_SIZE = re.compile(r"_(v1|124m|1b|first_token|turns)$")
"""Ends of names of cases that share a module."""
Role = Literal["ours", "peer", "baseline", "peak"]
HIGHER_IS_BETTER = ("tokens/s", "% MFU", "x alone")
"""Units; of all others, lower is better."""


class Unavailable(Exception):
    """This machine lacks what a contender needs; the message names it."""


@dataclass(frozen=True)
class Work:
    """One round of a contender, ready to run."""

    run: Callable[[], object]
    amount: float = 1.0
    """Units of the case (calls, tokens) in a round."""
    gflop: float | None = None
    """10^9 floating-point operations in a round, for the share of the peak."""
    facts: dict[str, object] = field(default_factory=dict)
    """Recorded in the JSON."""
    measures: bool = False
    """`run` returns measurements by unit; "seconds" among them replaces the wall time of the round."""
    warm: bool = True
    """Run once before the first round."""


@dataclass(frozen=True)
class Contender:
    """One implementation of the work of a case."""

    name: str
    build: Callable[[bool], Work]
    """Called in the process of the contender, with True for tiny sizes."""
    role: Role = "peer"
    group: str = ""
    """Ratios are to the best peer of the group."""
    minus: str | None = None
    """The baseline whose time is subtracted, round by round."""
    target: float | None = None
    """The smallest ratio if the group has peers, else the largest median."""
    alone: str | None = None
    """The contender with batch 1, or without a server: the unit "x alone" is the throughput relative to it."""
    goals: Mapping[str, str] = field(default_factory=dict)
    """Unit -> "≥ 55", "≤ 2", or as a ratio "≥ 1.3x"."""
    package: str = ""
    """The package it needs, which decides its environment (bench/peers.py)."""


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work, compared by ms per unit, units per second, or what their rounds measure."""

    name: str
    unit: Literal["ms", "tokens/s", "s", "GiB"]
    contenders: tuple[Contender, ...]
    device: str = "cpu"
    rounds: int = 9
    """Default number of rounds."""
    starts: int = 1
    """Contenders that start at the same time."""
    fresh: bool = False
    """Every round in a new process."""


def load_case(name: str, device: str = "cpu") -> Case:
    """Return the case of that name in bench.cases for a device; a dotted name is any module with a CASE.

    A module has CASE, or CASES: one case in several sizes (train_step, train_step_v1) and for several devices. Raises
    ValueError if there is none for the device.
    """
    module = importlib.import_module(name if "." in name else f"bench.cases.{_SIZE.sub('', name)}")
    cases: tuple[Case, ...] = getattr(module, "CASES", ()) or (module.CASE,)
    found = [case for case in cases if case.device == device and ("." in name or case.name == name)]
    if not found:
        raise ValueError(f"case {name} does not run on {device}; these do: {', '.join(ON_CUDA)}")
    return found[0]


def temporary_folder() -> Path:
    """Return a new folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
