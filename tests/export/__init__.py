"""Helpers of the export tests: models with large random weights, of every kind that can be exported."""

from __future__ import annotations

import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer
from tests import token_caches

V1: dict[str, object] = {"norm": "rmsnorm", "mlp": "swiglu"}
MODELS: dict[str, dict[str, object]] = {
    "v1": {**V1, "V": 404},
    "grouped": {**V1, "V": 404, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 500.0},
    "biases": {**V1, "V": 404, "qkv_bias": True, "norm_eps": 1e-3},
    "head norms": {**V1, "V": 404, "qk_norm": True, "head_dim": 32},
    "scaled RoPE": {**V1, "V": 404, "rope_scale": 4.0, "rope_context": 16},
    "v1 of bytes": V1,
    "v0": {},
    "v0, untied": {"tie_embeddings": False, "rope_theta": 700.0},
    "learned positions": {"positions": "learned"},
    "GPT-2": {"positions": "learned", "mlp": "gelu_tanh", "bias": True},
    "v0 with biases": {"bias": True},
}
"""Name -> options of the model; V is that of the tokenizer of the tests, or 256."""


def make(name: str) -> tuple[GPT, AnyTokenizer]:
    """A model whose every weight matters to the logits, and its tokenizer."""
    model = GPT({"T": 64, "C": 64, "L": 2, "H": 4, "dropout": 0.0, **MODELS[name]}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight.dim() == 1) + 0.2 * torch.randn(weight.shape, generator=generator))
    return model, token_caches.tokenizer() if model.config.V == 404 else ByteTokenizer()


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], number: int) -> list[int]:
    """The prompt and its greedy continuation, one full forward pass per token."""
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def some_ids(model: GPT, number: int) -> list[int]:
    """Random ids, the same in every test."""
    return torch.randint(model.config.V, (number,), generator=torch.Generator().manual_seed(1)).tolist()
