"""AdamW for everything, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from niels_gpt.config import TrainConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.training.optim.muon import Muon
from niels_gpt.training.parallel.sharding import is_sharded


def make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of train.optimizer for the weights that are not frozen; AdamW is fused.

    Weight decay applies to matrices, not to norms.

    On CUDA the learning rate is a tensor on the device, where a captured graph reads it; change it with `set_lr`.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() <= 1]
    if config.optimizer == "muon":
        embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        if not model.config.tie_embeddings:
            embeddings.append(model.lm_head.weight)
        hidden = [p for p in matrices if all(p is not embedding for embedding in embeddings)]
        return MuonAdamW(hidden, [*embeddings, *vectors], config)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=config.betas, fused=True, **_rate(matrices[0], config))


def _rate(like: torch.Tensor, config: TrainConfig) -> dict[str, Any]:
    """The learning-rate options of an optimizer; on CUDA a tensor, which can change under a captured graph."""
    if not like.is_cuda or is_sharded(like):
        return {"lr": config.base_lr}
    return {"lr": torch.tensor(config.base_lr, device=like.device), "capturable": True}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the hidden matrices, AdamW on embeddings and norms, with one learning rate.

    On the embedded data it reaches the loss of AdamW after about half the steps (docs/lab-notebook.md).
    """

    def __init__(self, matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], config: TrainConfig) -> None:
        rate = _rate(others[0], config)
        self._muon = Muon(matrices, lr=rate["lr"], weight_decay=config.weight_decay)
        self._adamw = torch.optim.AdamW(others, betas=config.betas, weight_decay=0.0, fused=True, **rate)
        super().__init__([*matrices, *others], {})
        # The group objects of both optimizers, not copies: a learning rate that is set here reaches them.
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._muon.step()
        self._adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._muon.load_state_dict(state_dict["muon"])
        self._adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]
