"""Peak memory of training, with the rows of train_step; ours also with engine.checkpoint_activations.

On CUDA the peak of allocated memory, in bf16 and compiled; on a CPU the growth of the process, in fp32.
"""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Role
from bench.models import GPT2_SMALL, PACKAGES, PEERS, SIZES, Size
from bench.training import OURS, Setting, memory_work


def _contender(label: str, name: str, setting: Setting, **options: Any) -> Contender:
    role: Role = "ours" if name == OURS else "peer"
    package = PACKAGES.get(name, "")
    return Contender(label, lambda quick: memory_work(name, setting, quick), role=role, package=package, **options)


def _case(size: Size, device: str) -> Case:
    setting = Setting(size, device, bf16=device == "cuda")
    checkpointed = Setting(size, device, bf16=device == "cuda", checkpointed=True)
    contenders = (
        _contender(OURS, OURS, setting, goals={"GiB": "≥ 1x"} if device == "cuda" else {}),
        _contender(f"{OURS}, checkpointing", OURS, checkpointed),
        *(_contender(peer, peer, setting) for peer in PEERS),
    )
    name = "memory" if size.name == "v0" else f"memory_{size.name}"
    starts = 1 if device == "cpu" else 3 if size is GPT2_SMALL else 6
    return Case(name, "GiB", contenders, device, rounds=1, starts=starts)


CASES = tuple(_case(size, device) for device in ("cpu", "cuda") for size in SIZES.values())
