"""One GPT: embedding, L pre-norm blocks of attention and MLP, tied output head.

Shapes: B rows, n <= T positions, C width, H heads of D = C / H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from niels_gpt.config import ModelConfig
from niels_gpt.device import keep_freed_memory
from niels_gpt.model.dropout import Dropout
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.model.rope import rope_cache, rotate


class Attention(nn.Module):
    """Causal self-attention with RoPE on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.H, self.D = config.H, config.D
        self.qkv = nn.Linear(config.C, 3 * config.C, bias=False)
        self.out = nn.Linear(config.C, config.C, bias=False)

    def forward(
        self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, layer: int, cache: KVCache | None
    ) -> torch.Tensor:
        qkv = self.qkv(x)
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # Under bf16 autocast attention stays float32: on a CPU, SDPA's backward takes half the time so.
            with torch.autocast("cpu", enabled=False):
                y = self._attend(qkv.float(), sin, cos, layer, cache)
        else:
            y = self._attend(qkv, sin, cos, layer, cache)
        return self.out(y)

    def _attend(
        self, qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, layer: int, cache: KVCache | None
    ) -> torch.Tensor:
        """What the heads bring back, side by side (B, n, C)."""
        B, n, _ = qkv.shape
        # Token-major (B, n, 3, H, D): q and k are rotated together, and no transpose is copied.
        qk, v = qkv.view(B, n, 3, self.H, self.D).split((2, 1), dim=2)
        qk = rotate(qk, sin, cos)
        q, k = qk.transpose(1, 3).unbind(2)  # (B, H, n, D) each
        if cache is None:
            v = v.squeeze(2).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)  # scaled by 1/sqrt(D)
        else:
            k, v = cache.extend(layer, torch.stack((k, v.squeeze(2).transpose(1, 2)), dim=1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
        return y.transpose(1, 2).reshape(B, n, self.H * self.D)


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.C, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout on both branches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.C, bias=False)
        self.attn = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.C, bias=False)
        self.mlp = MLP(config)
        self.drop = Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, layer: int, cache: KVCache | None
    ) -> torch.Tensor:
        x = x + self.drop(self.attn(self.norm_attn(x), sin, cos, layer, cache))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    `config` is a ModelConfig or a dict with its keys; ValueError where the numbers do not fit.
    Weights start small (std 0.02, residual projections divided by sqrt(2L)), so that the untrained
    loss is near ln V; they come from torch's default generator.
    """

    sin: torch.Tensor
    cos: torch.Tensor

    def __init__(self, config: ModelConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config = ModelConfig.of(config)
        self.tok_emb = nn.Embedding(config.V, config.C)
        self.drop = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
        self.norm = nn.LayerNorm(config.C, bias=False)
        self.lm_head = nn.Linear(config.C, config.V, bias=False)
        self.lm_head.weight = self.tok_emb.weight
        sin, cos = rope_cache(config.T, config.D)
        # (T, 1, 1, D/2): broadcast over the (B, n, 2, H, D) layout of Attention. Not saved: derived.
        self.register_buffer("sin", sin[0, 0, :, None, None], persistent=False)
        self.register_buffer("cos", cos[0, 0, :, None, None], persistent=False)
        self._init_weights()
        keep_freed_memory()

    def _init_weights(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * self.config.L) ** 0.5 if residual else 0.02)

    def forward(self, x: torch.Tensor, *, cache: KVCache | None = None) -> torch.Tensor:
        """Logits (B, n, V) for ids x (B, n), 1 <= n <= T.

        With a KVCache the n tokens continue what the cache holds, and are added to it.
        Raises ValueError for a length outside 1..T.
        """
        if x.dim() != 2 or not 1 <= x.shape[1] <= self.config.T:
            raise ValueError(f"expected ids of shape (B, n) with 1 <= n <= T={self.config.T}, got {tuple(x.shape)}")
        if cache is None:
            n = x.shape[1]
            sin, cos = self.sin[:n], self.cos[:n]
        else:
            start = cache.advance(x.shape[1])
            positions = slice(start, start + x.shape[1]) if isinstance(start, int) else start  # else (B, n)
            sin, cos = self.sin[positions], self.cos[positions]
        h = self.drop(self.tok_emb(x))
        for layer, block in enumerate(self.blocks):
            h = block(h, sin, cos, layer, cache)
        return self.lm_head(self.norm(h))

    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def device(self) -> torch.device:
        return self.tok_emb.weight.device

    def num_parameters(self) -> int:
        """Number of weights, the tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())
