"""Training steps with LoRA beside steps that train all weights, for a model of SmolLM2-135M's shape.

The step that trains everything counts as the peer: 0.7 of its time is 1 / 0.7 = 1.43 of its tokens per second.
"""

from __future__ import annotations

import dataclasses

from bench.case import Case, Contender
from bench.models import SMOLLM2, SMOLLM2_SHALLOW
from bench.training import OURS, Setting, step_work

RANK = 16


def _case(device: str) -> Case:
    cuda = device == "cuda"
    full = Setting(SMOLLM2 if cuda else SMOLLM2_SHALLOW, device, bf16=cuda)
    lora = dataclasses.replace(full, lora=RANK)
    in_half = dataclasses.replace(lora, lora_in_half=True)
    contenders = (
        Contender(f"{OURS}, LoRA {RANK}", lambda quick: step_work(OURS, lora, quick), "ours", target=1.43),
        Contender(f"{OURS}, in the last half", lambda quick: step_work(OURS, in_half, quick), "ours", target=1.43),
        Contender(f"{OURS}, all weights", lambda quick: step_work(OURS, full, quick)),
    )
    return Case("lora_step", "tokens/s", contenders, device, rounds=9 if cuda else 3)


CASES = (_case("cpu"), _case("cuda"))
