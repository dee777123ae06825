"""The first text of a fresh process: seconds from the loaded model to a token, and to all of them; every round anew.

What a process leaves on the disk for the next one (compiled kernels) is there from the second round on, except for the
contender with an empty cache, which never has anything of that kind.
"""

from __future__ import annotations

import os
from typing import Any

from bench.case import Case, Contender, Work
from bench.cases.pretrain_batch import folder
from bench.generation import Talk, cold_work
from bench.models import V0, V1
from bench.training import OURS


def _with_empty_cache(talk: Talk, quick: bool) -> Work:
    os.environ["TRITON_CACHE_DIR"] = str(folder())
    return cold_work(OURS, talk, quick)


def _contender(name: str, talk: Talk, **options: Any) -> Contender:
    label = f"{name}, {talk.size.name}"
    return Contender(label, lambda quick: cold_work(name, talk, quick), group=talk.size.name, **options)


def _contenders(talk: Talk) -> tuple[Contender, ...]:
    size, cuda = talk.size.name, talk.device == "cuda"
    goals = {"s": "≤ 2"} if cuda else {}
    empty = Contender(
        f"{OURS}, {size}, empty cache", lambda quick: _with_empty_cache(talk, quick), "ours", size, goals=goals
    )
    return (
        _contender(OURS, talk, role="ours", goals=goals),
        *([empty] if cuda else []),
        *(_contender(peer, talk) for peer in ("nano", "GPT-2", "Llama")),
    )


CASES = tuple(
    Case(
        "generate_cold",
        "s",
        (*_contenders(Talk(V0, device)), *_contenders(Talk(V1, device))),
        device,
        rounds=1 if device == "cuda" else 3,  # there a peer takes 15 s for its first 256 tokens
        starts=10 if device == "cuda" else 1,
        fresh=True,
    )
    for device in ("cpu", "cuda")
)
