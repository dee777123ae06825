"""Greedy generation with batch 1 and batch 32; all contenders but nano have a KV cache.

On a CPU 200 tokens from a prompt of 11 bytes, on CUDA 256 tokens from a prompt of one byte: they fit the context of v0.
"""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Role
from bench.generation import Setup, warm_work
from bench.models import PACKAGES, V0, V1
from bench.training import OURS


def _contender(name: str, setup: Setup, group: str = "", **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    label = f"{name}, batch {setup.batch}"
    group = group or label.split(", ")[1]
    package = PACKAGES.get(name, "")
    return Contender(label, lambda quick: warm_work(name, setup, quick), role, group, package=package, **options)


def _on_cpu(name: str, setup: Setup, target: float | None) -> Case:
    many = Setup(setup.size, batch=32)
    contenders = (
        _contender(OURS, setup, target=target),
        *(_contender(peer, setup) for peer in ("GPT-2", "Llama")),
        _contender("litgpt", setup, "litgpt"),  # the target is against transformers only
        _contender("nano", setup, "nano"),
        *(_contender(name, many) for name in (OURS, "GPT-2", "Llama")),
    )
    return Case(name, "tokens/s", contenders)


def _on_cuda(name: str, setup: Setup, least: str) -> Case:
    many = Setup(setup.size, "cuda", 32)
    contenders = (
        _contender(OURS, setup, goals={"tokens/s": least}),
        *(_contender(peer, setup) for peer in ("nano", "GPT-2", "Llama", "litgpt")),
        _contender(OURS, many, alone=f"{OURS}, batch 1", goals={"x alone": "≥ 15"}),
        *(_contender(peer, many) for peer in ("nano", "GPT-2", "Llama")),
    )
    return Case(name, "tokens/s", contenders, "cuda", starts=9)


CASES = (
    _on_cpu("generate", Setup(V0), 3.0),
    _on_cpu("generate_v1", Setup(V1), None),
    _on_cuda("generate", Setup(V0, "cuda"), "≥ 9000"),
    _on_cuda("generate_v1", Setup(V1, "cuda"), "≥ 3500"),
)
