"""The learning rate of a step: linear warm-up, then cosine decay; and what follows if a run is extended."""

from __future__ import annotations

import dataclasses
import math

from niels_gpt.config import TrainConfig
from niels_gpt.config.schema import default_warmup


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


def scheduled_lr(step: int, train: TrainConfig) -> float:
    """The learning rate of a step of a run whose total_steps may have changed on the way (`train.extended`).

    Steps before a change keep the learning rate that they had. From the change on it is that of `lr_at_step` with the
    new total_steps, reached by a linear ramp of `ramp_steps` from the learning rate of the last step before. So it is a
    function of the config alone, and a run that is stopped and resumed anywhere has the same learning rates. Raises
    ValueError as `lr_at_step` does, for the warm-up only if total_steps never changed.
    """
    passed = sum(at <= step for at, _ in train.extended)
    total = train.extended[passed][1] if passed < len(train.extended) else train.total_steps
    warmup = train.warmup_steps
    if passed and warmup >= total:  # a run that was cut short during its warm-up
        warmup = default_warmup(total)
    lr = lr_at_step(step, total, base_lr=train.base_lr, warmup_steps=warmup, min_lr=train.min_lr)
    if not passed:
        return lr
    at, before = train.extended[passed - 1]
    ramp = ramp_steps(at, total)
    if step - at >= ramp:
        return lr
    earlier = dataclasses.replace(train, total_steps=before, extended=train.extended[: passed - 1])
    start = scheduled_lr(at - 1, earlier)
    return start + (lr - start) * (step - at + 1) / (ramp + 1)


def ramp_steps(at: int, total: int) -> int:
    """Steps of the ramp if total_steps changes to `total` after `at` steps: the default warm-up of the steps left."""
    return default_warmup(total - at)
