"""The learning rate of a step: linear warm-up, then cosine decay."""

from __future__ import annotations

import math


def lr_at_step(
    step: int, total_steps: int, *, base_lr: float = 3e-4, warmup_steps: int = 200, min_lr: float = 3e-5
) -> float:
    """The learning rate of a step: linear warm-up to base_lr, then cosine decay to min_lr.

    0 at step 0, base_lr at step warmup_steps, min_lr at step total_steps - 1. With warmup_steps=0 it starts at base_lr.
    Raises ValueError for a step outside [0, total_steps - 1], and for a warm-up of total_steps or more.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step must be in [0, {total_steps - 1}], got {step}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"a warm-up of {warmup_steps} steps does not fit into {total_steps} training steps: "
            f"train longer, or set warmup_steps to at most {total_steps - 1}"
        )
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    span = total_steps - 1 - warmup_steps
    progress = (step - warmup_steps) / span if span else 0.0
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return share * base_lr + (1.0 - share) * min_lr  # exact at both ends
