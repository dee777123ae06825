"""The loss of every task: next-token cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def loss_fn(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all positions of logits (B, T, V) and targets y (B, T).

    Targets of -100 do not count (masked positions of chat fine-tuning).
    """
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def summed_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`loss_fn` before it is divided by the number of targets; 0 where there is none."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="sum")
