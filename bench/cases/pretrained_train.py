"""Training steps of a model of SmolLM2-135M's shape: grouped heads, SwiGLU, tied head, vocabulary of 49,152.

On CUDA 16 rows of 2,048 tokens in bf16, peers compiled with fused AdamW (bench/training.py). On a CPU two layers, one
row of 256 tokens, in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.case import Case, Contender, Role
from bench.models import PACKAGES, SMOLLM2, SMOLLM2_SHALLOW
from bench.training import OURS, Setting, step_work


def _contender(name: str, setting: Setting, **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    label = f"{name}, fp8" if setting.fp8 else name
    package = PACKAGES.get(name, "")
    return Contender(label, lambda quick: step_work(name, setting, quick), role, package=package, **options)


def _case(device: str) -> Case:
    cuda = device == "cuda"
    setting = Setting(SMOLLM2 if cuda else SMOLLM2_SHALLOW, device, bf16=cuda)
    contenders = (
        _contender(OURS, setting, target=1.0),
        *([_contender(OURS, dataclasses.replace(setting, fp8=True), target=1.0)] if cuda else []),
        *(_contender(peer, setting) for peer in ("Llama", "litgpt")),
    )
    return Case("pretrained_train", "tokens/s", contenders, device, rounds=9 if cuda else 3, starts=2 if cuda else 1)


CASES = (_case("cpu"), _case("cuda"))
