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
    if config.bias and config.norm == "layernorm":
        yield "norm.bias", (config.C,)
    yield "lm_head.weight", (config.V, config.C)


def number_of_weights(config: ModelConfig) -> int:
    """Number of weights of a GPT, a tied matrix counted once."""
    block = sum(map(math.prod, _block_shapes(config).values()))
    positions = config.T * config.C if config.positions == "learned" else 0
    embeddings = config.V * config.C * (1 if config.tie_embeddings else 2)
    norm = config.C * (2 if config.bias and config.norm == "layernorm" else 1)
    return embeddings + positions + config.L * block + norm


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, wide, heads = config.C, config.d_ff, config.H * config.D
    qkv = heads + 2 * config.kv_heads * config.D
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, *shape: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    norm_bias = config.bias and config.norm == "layernorm"
    add("norm_attn", C, bias=norm_bias)
    add("attn.qkv", qkv, C, bias=config.qkv_bias or config.bias)
    if config.qk_norm:
        add("attn.norm_q", config.D, bias=False)
        add("attn.norm_k", config.D, bias=False)
    add("attn.out", C, heads, bias=config.bias)
    add("norm_mlp", C, bias=norm_bias)
    if config.gated:
        add("mlp.gate", wide, C, bias=config.bias)
    add("mlp.up", wide, C, bias=config.bias)
    add("mlp.down", C, wide, bias=config.bias)
    return shapes
