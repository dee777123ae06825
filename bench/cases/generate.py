"""New tokens, greedy, alone and 32 at a time; everyone with a KV cache but nano, which has none.

On a CPU 200 from a prompt of 11 bytes, on CUDA 256 from a prompt of one: so many fit the window of v0.
"""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Role
from bench.generation import Talk, warm_work
from bench.models import V0, V1
from bench.training import OURS


def _contender(name: str, talk: Talk, group: str = "", **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    label = f"{name}, batch {talk.batch}"
    return Contender(label, lambda quick: warm_work(name, talk, quick), role, group or label.split(", ")[1], **options)


def _on_cpu(name: str, talk: Talk, target: float | None) -> Case:
    many = Talk(talk.size, batch=32)
    contenders = (
        _contender(OURS, talk, target=target),
        *(_contender(peer, talk) for peer in ("GPT-2", "Llama")),
        _contender("litgpt", talk, "litgpt"),  # the target speaks of transformers; others stand beside it
        _contender("nano", talk, "nano"),
        *(_contender(name, many) for name in (OURS, "GPT-2", "Llama")),
    )
    return Case(name, "tokens/s", contenders)


def _on_cuda(name: str, talk: Talk, least: str) -> Case:
    many = Talk(talk.size, "cuda", 32)
    contenders = (
        _contender(OURS, talk, goals={"tokens/s": least}),
        *(_contender(peer, talk) for peer in ("nano", "GPT-2", "Llama", "litgpt")),
        _contender(OURS, many, alone=f"{OURS}, batch 1", goals={"x alone": "≥ 15"}),
        *(_contender(peer, many) for peer in ("nano", "GPT-2", "Llama")),
    )
    return Case(name, "tokens/s", contenders, "cuda", starts=9)


CASES = (
    _on_cpu("generate", Talk(V0), 3.0),
    _on_cpu("generate_v1", Talk(V1), None),
    _on_cuda("generate", Talk(V0, "cuda"), "≥ 9000"),
    _on_cuda("generate_v1", Talk(V1, "cuda"), "≥ 3500"),
)
