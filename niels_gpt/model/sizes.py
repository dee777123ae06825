"""Shapes and number of the weights of a GPT, from its config alone: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator

from niels_gpt.config import ModelConfig


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each entry of the state dict of a GPT, in its order."""
    yield "tok_emb.weight", (config.V, config.C)
    if config.positions == "learned":
        yield "pos_emb.weight", (config.T, config.C)
    for layer in range(config.L):
        yield from ((f"blocks.{layer}.{name}.weight", shape) for name, shape in _block_shapes(config).items())
    yield "norm.weight", (config.C,)
    yield "lm_head.weight", (config.V, config.C)


def number_of_weights(config: ModelConfig) -> int:
    """Number of weights of a GPT, a tied matrix counted once."""
    block = sum(map(math.prod, _block_shapes(config).values()))
    positions = config.T * config.C if config.positions == "learned" else 0
    embeddings = config.V * config.C * (1 if config.tie_embeddings else 2)
    return embeddings + positions + config.L * block + config.C


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, wide, qkv = config.C, config.d_ff, (config.H + 2 * config.kv_heads) * config.D
    gate: dict[str, tuple[int, ...]] = {"mlp.gate": (wide, C)} if config.mlp == "swiglu" else {}
    attention: dict[str, tuple[int, ...]] = {"norm_attn": (C,), "attn.qkv": (qkv, C), "attn.out": (C, C)}
    return attention | {"norm_mlp": (C,)} | gate | {"mlp.up": (wide, C), "mlp.down": (C, wide)}
