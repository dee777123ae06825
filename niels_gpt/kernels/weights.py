"""What a model hands to kernels: its weights by role, and what is computed with them, as data.

A kernel computes only what is stated here, and hands anything else back to the model; it guesses nothing from a missing
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from niels_gpt.kernels.lora import Adapter


class NormWeights(Protocol):
    """A norm over the last dimension."""

    eps: float
    kind: str
    """`layernorm`, `rmsnorm`, or one that no kernel knows."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


class HeadSizes(NamedTuple):
    """How the columns of a qkv matmul divide into heads: H of queries, then `kv` of keys, then `kv` of values."""

    H: int
    kv: int
    D: int

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.kv < self.H


def normalized_heads(
    qkv: torch.Tensor, heads: HeadSizes, norm_q: NormWeights | None, norm_k: NormWeights | None
) -> torch.Tensor:
    """qkv (..., (H + 2 kv) D) with an RMSNorm over each head of queries and keys; unchanged without norms.

    Computed in float32 at least, as the other norms are.
    """
    if norm_q is None or norm_k is None:
        return qkv
    H, kv, D = heads
    q, k, v = qkv.unflatten(-1, (H + 2 * kv, D)).split((H, kv, kv), dim=-2)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k = (
        F.rms_norm(each.to(wide), (D,), norm.weight, norm.eps).to(qkv.dtype)
        for each, norm in ((q, norm_q), (k, norm_k))
    )
    return torch.cat((q, k, v), dim=-2).flatten(-2)


class BlockWeights(NamedTuple):
    """The weights of one transformer block; matrices are (outputs, inputs), as in nn.Linear."""

    norm_attn: NormWeights
    qkv: torch.Tensor
    out: torch.Tensor
    norm_mlp: NormWeights
    gate: torch.Tensor | None
    """The MLP is down(activation(gate(x)) * up(x)); None: down(activation(up(x)))."""
    up: torch.Tensor
    down: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]
    """The function itself: kernels have forms of F.gelu and F.silu, and call any other."""
    heads: HeadSizes
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    """Low-rank updates by the name of the field of the matrix; only in training, and then the matrices are frozen."""
    biases: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Biases by the name of the field of the matrix."""
    norm_q: NormWeights | None = None
    """RMSNorm (D,) of each query head, before RoPE; None: there is none, and none of the keys."""
    norm_k: NormWeights | None = None

    @classmethod
    def of(cls, block: Any) -> BlockWeights:
        """The weights of a `Block` of `model/gpt.py`."""
        attn, mlp = block.attn, block.mlp
        linears = {"qkv": attn.qkv, "out": attn.out, "up": mlp.up, "down": mlp.down}
        linears |= {} if mlp.gate is None else {"gate": mlp.gate}
        adapters = {role: getattr(linear, "adapter", None) for role, linear in linears.items()}  # of a `LoRALinear`
        return cls(
            block.norm_attn,
            attn.qkv.weight,
            attn.out.weight,
            block.norm_mlp,
            None if mlp.gate is None else mlp.gate.weight,
            mlp.up.weight,
            mlp.down.weight,
            mlp.activation,
            attn.heads,
            adapters={role: adapter for role, adapter in adapters.items() if adapter is not None},
            biases={role: linear.bias for role, linear in linears.items() if linear.bias is not None},
            norm_q=attn.norm_q,
            norm_k=attn.norm_k,
        )

    def normalized_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """The function above with these norms."""
        return normalized_heads(qkv, self.heads, self.norm_q, self.norm_k)

    @property
    def mlp(self) -> str:
        """`gelu` or `swiglu`, which kernels have as one; `other` for another activation."""
        if self.gate is None:
            return "gelu" if self.activation is F.gelu else "other"
        return "swiglu" if self.activation is F.silu else "other"

    @property
    def biased(self) -> bool:
        """Whether there is a bias besides that of `qkv`: in a norm or after another matrix."""
        return self.norm_attn.bias is not None or self.norm_mlp.bias is not None or bool(self.biases.keys() - {"qkv"})

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
    """(V, C), of the ids that can be generated; the embedding itself if they are tied."""

    @classmethod
    def of(cls, model: Any) -> ModelWeights:
        """The weights of a `GPT`. Raises ValueError if it has adapters."""
        learned = None if model.pos_emb is None else model.pos_emb.weight
        sin, cos = (model.sin, model.cos) if learned is None else (None, None)
        blocks = [block.weights() for block in model.blocks]
        if any(block.adapters for block in blocks):
            raise ValueError("this model has adapters, which decoders do not compute: use model.lora.merged_model")
        head = model.lm_head.weight if model.sampled_ids is None else model.lm_head.weight[: model.sampled_ids]
        return cls(model.tok_emb.weight, learned, sin, cos, blocks, model.norm, head)
