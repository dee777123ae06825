"""Greedy decoding with a model of SmolLM2-135M's shape: 256 tokens after a prompt of 128, for one prompt and for eight.

On a CPU two layers and 32 new tokens, in fp32: the head has four fifths of the weights, and reading them takes most of
the time. A static cache is measured on CUDA only, where transformers compiles the forward for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.case import Case, Contender, Role
from bench.generation import STATIC, Setup, warm_work
from bench.models import PACKAGES, SMOLLM2, SMOLLM2_SHALLOW
from bench.training import OURS


def _contender(name: str, setup: Setup, **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    group, package = f"batch {setup.batch}", "transformers" if name == STATIC else PACKAGES.get(name, "")
    return Contender(
        f"{name}, {group}", lambda quick: warm_work(name, setup, quick), role, group, package=package, **options
    )


def _case(device: str) -> Case:
    cuda = device == "cuda"
    one = Setup(SMOLLM2 if cuda else SMOLLM2_SHALLOW, device, prompt_tokens=128, new_tokens=256 if cuda else 32)
    many = dataclasses.replace(one, batch=8)
    target = 3.0 if cuda else None
    peers = ("Llama", STATIC) if cuda else ("Llama",)
    contenders = (
        _contender(OURS, one, target=target),
        *(_contender(peer, one) for peer in (*peers, "litgpt")),
        _contender(OURS, many, target=target),
        *(_contender(peer, many) for peer in peers),
    )
    return Case("pretrained_decode", "tokens/s", contenders, device, rounds=5 if cuda else 3, starts=7 if cuda else 1)


CASES = (_case("cpu"), _case("cuda"))
