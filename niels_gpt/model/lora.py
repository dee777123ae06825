"""LoRA: adapters of rank r on matrices of a GPT whose own weights are frozen (`train.lora`).

An adapted matrix is W + (alpha / r) B A, with A (r, inputs) random and B (outputs, r) zero at first. `attn.qkv` is one
matrix here, so queries, keys and values share one adapter. A model with adapters is for training; for everything else
`merged_model` returns an ordinary GPT.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from niels_gpt.config import LoRAConfig, ModelConfig
from niels_gpt.kernels import lora
from niels_gpt.model.gpt import GPT

A, B = "lora_A", "lora_B"


class LoRALinear(nn.Linear):
    """A linear map whose frozen weight has a low-rank update."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        self.lora_A = nn.Parameter(linear.weight.new_empty((rank, linear.in_features), dtype=torch.float32))
        self.lora_B = nn.Parameter(linear.weight.new_zeros((linear.out_features, rank), dtype=torch.float32))
        bound = linear.in_features**-0.5
        nn.init.uniform_(self.lora_A, -bound, bound)

    @property
    def adapter(self) -> lora.Adapter:
        return lora.Adapter(self.lora_A, self.lora_B * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = lora.linear(x, self.weight, self.adapter)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def adapted_matrices(config: ModelConfig, settings: LoRAConfig) -> list[str]:
    """The names of the matrices of a block that get adapters: `settings.targets`, or all."""
    every = ["attn.qkv", "attn.out", *(["mlp.gate"] if config.gated else []), "mlp.up", "mlp.down"]
    return [name for name in every if not settings.targets or name in settings.targets]


def add_adapters(model: GPT, settings: LoRAConfig) -> None:
    """Freeze the weights of a model and add adapters to it. A is drawn from torch's default generator."""
    model.requires_grad_(False)
    for block in model.layers()[-settings.layers :]:  # all for 0
        for name in adapted_matrices(model.config, settings):
            owner, _, attribute = name.rpartition(".")
            parent = block.get_submodule(owner)
            setattr(parent, attribute, LoRALinear(getattr(parent, attribute), settings.rank, settings.scale))


def has_adapters(model: GPT) -> bool:
    """Whether `add_adapters` was called for a model."""
    return any(isinstance(module, LoRALinear) for module in model.modules())


def adapter_state(model: GPT) -> dict[str, torch.Tensor]:
    """The entries of the state dict that are trained."""
    return {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}


def base_state(model: GPT) -> dict[str, torch.Tensor]:
    """The entries of the state dict that are frozen: the state dict of a GPT without adapters."""
    return {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a weight with this name belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def merged_state(state: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The state dict of a model with its adapters added to the matrices: that of an ordinary GPT.

    Tensors without an adapter are not copied.
    """
    merged = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name in (name for name in state if name.endswith(f".{A}")):
        matrix = name.removesuffix(f".{A}")
        adapter = lora.Adapter(state[name], state[f"{matrix}.{B}"] * scale)
        merged[f"{matrix}.weight"] = lora.merge(state[f"{matrix}.weight"], adapter)
    return merged


def merged_model(model: GPT) -> GPT:
    """The ordinary GPT, in eval mode, that a model with adapters computes; it shares the weights without adapters."""
    scale = next(module.scale for module in model.modules() if isinstance(module, LoRALinear))
    with torch.device("meta"):
        copy = GPT(model.config)
    for name, buffer in model.named_buffers():
        copy.register_buffer(name, buffer, persistent=False)
    copy.load_state_dict(merged_state(model.state_dict(), scale), assign=True)
    if model.config.tie_embeddings:
        copy.lm_head.weight = copy.tok_emb.weight
    return copy.requires_grad_(False).eval()
