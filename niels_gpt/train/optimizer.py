"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import torch

from niels_gpt.config import TrainConfig
from niels_gpt.model.gpt import GPT


def make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all weights; matrices and embeddings decay, norms do not. Fused: one pass over memory."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.base_lr, betas=config.betas, fused=True)
