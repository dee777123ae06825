"""Fast evaluation: the mean loss of a few random batches per stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from niels_gpt.batching import get_batch
from niels_gpt.evaluation.scoring import token_nats
from niels_gpt.model.eval_mode import eval_mode
from niels_gpt.model.gpt import GPT
from niels_gpt.model.loss import loss_fn


def nats_and_targets(
    model: GPT, batches: Iterable[tuple[torch.Tensor, ...]], *, device: str | torch.device
) -> tuple[float, int]:
    """Return (total nats, number of targets) over all batches (x, targets); targets of -100 are ignored."""
    total, targets = 0.0, 0
    with eval_mode(model):
        for x, y in batches:
            counted = y != -100
            number, length = int(counted.sum()), int(counted.any(0).nonzero().max()) + 1 if counted.any() else 0
            if number:  # positions after the last target change nothing: padding costs no time
                nats = token_nats(model, x[:, :length].to(device), y[:, :length])
                total += nats.cpu().double().sum().item()
            targets += number
    return total, targets


def evaluate(
    model: GPT,
    eval_streams: Mapping[str, bytes],
    *,
    eval_steps: int,
    B: int,
    T: int,
    device: str,
    generator: torch.Generator,
) -> dict[str, float]:
    """Return the mean loss of each stream in nats per token, over eval_steps batches of B windows.

    The model's train/eval mode is restored. Raises ValueError for eval_steps below 1 and for a stream shorter than
    T + 1 bytes.
    """
    return evaluate_rows(
        model, eval_streams, slice(None), eval_steps=eval_steps, B=B, T=T, device=device, generator=generator
    )


def evaluate_rows(
    model: GPT,
    eval_streams: Mapping[str, bytes],
    rows: slice,
    *,
    eval_steps: int,
    B: int,
    T: int,
    device: str,
    generator: torch.Generator,
) -> dict[str, float]:
    """Return what `evaluate` does, over these rows of every batch only. Raises as it does."""
    if eval_steps < 1:
        raise ValueError(f"eval_steps must be at least 1, got {eval_steps}")
    means = {}
    with eval_mode(model):
        for name, stream in eval_streams.items():
            total = torch.zeros((), dtype=torch.float64)
            for _ in range(eval_steps):
                x, y = get_batch({name: stream}, p={name: 1.0}, B=B, T=T, device=device, generator=generator)
                total += loss_fn(model(x[rows]), y[rows]).cpu().double()
            means[name] = total.item() / eval_steps
    return means
