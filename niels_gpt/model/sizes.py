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
        yield from ((f"blocks.{layer}.{name}", shape) for name, shape in _block_shapes(config).items())
    yield "norm.weight", (config.C,)
    yield "lm_head.weight", (config.V, config.C)


def number_of_weights(config: ModelConfig) -> int:
    """Number of weights of a GPT, a tied matrix counted once."""
    block = sum(map(math.prod, _block_shapes(config).values()))
    positions = config.T * config.C if config.positions == "learned" else 0
    embeddings = config.V * config.C * (1 if config.tie_embeddings else 2)
    return embeddings + positions + config.L * block + config.C


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, wide, heads = config.C, config.d_ff, config.H * config.D
    qkv = heads + 2 * config.kv_heads * config.D
    shapes: dict[str, tuple[int, ...]] = {"norm_attn.weight": (C,), "attn.qkv.weight": (qkv, C)}
    if config.qkv_bias:
        shapes["attn.qkv.bias"] = (qkv,)
    if config.qk_norm:
        shapes |= {"attn.norm_q.weight": (config.D,), "attn.norm_k.weight": (config.D,)}
    shapes |= {"attn.out.weight": (C, heads), "norm_mlp.weight": (C,)}
    if config.mlp == "swiglu":
        shapes["mlp.gate.weight"] = (wide, C)
    return shapes | {"mlp.up.weight": (wide, C), "mlp.down.weight": (C, wide)}
