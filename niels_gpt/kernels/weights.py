"""What a model hands to kernels: its weights by role, without the modules that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from niels_gpt.kernels.lora import Adapter


class NormWeights(Protocol):
    """A LayerNorm or RMSNorm without a bias."""

    eps: float
    rms: bool

    @property
    def weight(self) -> torch.Tensor: ...


class HeadSizes(NamedTuple):
    """How the columns of a qkv matmul divide into heads: H of queries, then `kv` of keys, then `kv` of values."""

    H: int
    kv: int
    D: int

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.kv < self.H


class BlockWeights(NamedTuple):
    """The weights of one transformer block; matrices are (outputs, inputs), as in nn.Linear."""

    norm_attn: NormWeights
    qkv: torch.Tensor
    out: torch.Tensor
    norm_mlp: NormWeights
    gate: torch.Tensor | None
    """SwiGLU's third matrix; None: the MLP is down(gelu(up(x)))."""
    up: torch.Tensor
    down: torch.Tensor
    heads: HeadSizes
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    """Low-rank updates by the name of the field of the matrix; only in training, and then the matrices are frozen."""

    def matrices(self) -> list[torch.Tensor]:
        """The four or five matrices."""
        return [m for m in (self.qkv, self.out, self.gate, self.up, self.down) if m is not None]


class ModelWeights(NamedTuple):
    """All weights of a GPT."""

    embedding: torch.Tensor
    positions: torch.Tensor | None
    """Learned positions (T, C); None: RoPE, with the tables below."""
    sin: torch.Tensor | None
    """(T, 1, D/2)"""
    cos: torch.Tensor | None
    blocks: list[BlockWeights]
    norm: NormWeights
    head: torch.Tensor
    """(V, C); the embedding itself if they are tied."""
