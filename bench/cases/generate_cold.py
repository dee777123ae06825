"""The first text of a new process: seconds from the loaded model to the first token, and to all; every round.

From the second round on, kernels compiled by an earlier process are on disk, except for the contender with an empty
cache.
"""

from __future__ import annotations

import os
from typing import Any

from bench.case import Case, Contender, Work, temporary_folder
from bench.generation import Setup, cold_work
from bench.models import PACKAGES, V0, V1
from bench.training import OURS


def _with_empty_cache(setup: Setup, quick: bool) -> Work:
    os.environ["TRITON_CACHE_DIR"] = str(temporary_folder())
    return cold_work(OURS, setup, quick)


def _contender(name: str, setup: Setup, **options: Any) -> Contender:
    label = f"{name}, {setup.size.name}"
    package = PACKAGES.get(name, "")
    return Contender(
        label, lambda quick: cold_work(name, setup, quick), group=setup.size.name, package=package, **options
    )


def _contenders(setup: Setup) -> tuple[Contender, ...]:
    size, cuda = setup.size.name, setup.device == "cuda"
    goals = {"s": "≤ 2"} if cuda else {}
    empty = Contender(
        f"{OURS}, {size}, empty cache", lambda quick: _with_empty_cache(setup, quick), "ours", size, goals=goals
    )
    return (
        _contender(OURS, setup, role="ours", goals=goals),
        *([empty] if cuda else []),
        *(_contender(peer, setup) for peer in ("nano", "GPT-2", "Llama")),
    )


CASES = tuple(
    Case(
        "generate_cold",
        "s",
        (*_contenders(Setup(V0, device)), *_contenders(Setup(V1, device))),
        device,
        rounds=1 if device == "cuda" else 3,  # on CUDA a peer takes 15 s for its first 256 tokens
        starts=10 if device == "cuda" else 1,
        fresh=True,
    )
    for device in ("cpu", "cuda")
)
