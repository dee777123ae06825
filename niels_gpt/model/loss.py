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
    """Summed cross-entropy: `loss_fn` times the number of targets that count; 0 if there are none."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="sum")
