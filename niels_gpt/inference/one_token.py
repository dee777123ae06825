"""The forward pass for one new token per row: `GPT.forward` with a cache, or the same without its overhead.

At one token a v0 layer computes for about 90 microseconds; module calls, views and separate additions would cost as
much again. Here queries and keys are rotated in place, keys and values are stored in one copy, and each residual
addition is part of the matmul before it. The tests compare the logits with those of `GPT.forward`.

`OneToken` is for all devices and types; `native_one_token` is faster on a CPU that has a C compiler. `PlainOneToken` is
the reference, for models whose code is not the one that these replace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from niels_gpt.kernels.weights import BlockWeights
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache

ROOT = 0.5**0.5
"""1 / sqrt(2)."""
Activation = Callable[[torch.Tensor], torch.Tensor]
Layer = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    Activation | None,
]
"""A block: norm, qkv, out, norm, gate or None, up, down, activation (None: GELU without a gate). Matrices are (inputs,
outputs)."""


class PlainOneToken:
    """Continues the rows of a cache by one token each, by the model's own code."""

    exact = True
    """Whether its keys and values are, up to float error, those of `GPT.hidden`."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,), which is added to the cache."""
        logits: torch.Tensor = self._model(ids[:, None], cache=cache)
        return logits[:, 0, : self._model.sampled_ids]


class OneToken:
    """Continues the rows of a cache by one token each."""

    exact = True
    """Whether its keys and values are, up to float error, those of `GPT.hidden`."""

    def __init__(self, model: GPT) -> None:
        config, weights = model.config, model.weights()
        self.config = config
        self._embedding = weights.embedding
        self._head = weights.head.t()
        self._norm, self._eps, self._rms = weights.norm.weight, weights.norm.eps, weights.norm.kind == "rmsnorm"
        self._zero = self._embedding.detach().new_zeros(1)
        self._positions = weights.positions  # (T, C)
        H, G, D = config.H, config.kv_heads, config.D
        self._sizes = [H * D, 2 * G * D]  # columns of queries, and of keys and values
        self._rotation: torch.Tensor | None = None
        if weights.sin is not None and weights.cos is not None:
            rotation = torch.complex(weights.cos, weights.sin)  # (T, 1, D/2)
            # Values are not rotated: their factor is 1.
            parts = [rotation.expand(-1, n, -1) for n in ((1, 1) if G == H else (H, G))]
            factors = torch.cat((*parts, torch.ones_like(parts[1])), dim=1)
            self._rotation = factors[:, :, None] if G == H else factors  # (T, 3, 1, D/2) or (T, H + 2 G, D/2)
        self._layers: list[Layer] = [
            (
                block.norm_attn.weight,
                block.qkv.t(),
                block.out.t(),
                block.norm_mlp.weight,
                None if block.gate is None else block.gate.t(),
                block.up.t(),
                block.down.t(),
                None if block.mlp == "gelu" else block.activation,
            )
            for block in weights.blocks
        ]
        described = [block for block in weights.blocks if block.biases or block.norm_q is not None]
        self._options = described or None  # None: most models have neither, and the loop skips both

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,), which is added to the cache. No gradients."""
        B, C, G, D, eps = ids.shape[0], self.config.C, self.config.kv_heads, self.config.D, self._eps
        width, rms, half, grouped = (C,), self._rms, D // 2, G < self.config.H
        heads_width = self._sizes[0]
        h, rotation = self._embedded(ids, cache)
        # The branches below cost nothing measurable; functions chosen beforehand cost v0 0.5%.
        options = self._options
        for layer, weights in enumerate(self._layers):
            norm1, qkv_weight, out_weight, norm2, gate_weight, up_weight, down_weight, activation = weights
            x = torch.rms_norm(h, width, norm1, eps) if rms else torch.layer_norm(h, width, norm1, None, eps, False)
            qkv = torch.mm(x, qkv_weight)  # (B, (H + 2 G) D)
            if options is not None:
                qkv = self._biased_and_normed(qkv, options[layer])
            if grouped:
                q, kv = self._heads(qkv, rotation)
            else:  # as in `_heads`, whose call costs v0 1% of a token; shapes passed as tuples cost 2%
                if rotation is not None:
                    torch.view_as_complex(qkv.view(B, 3, G, half, 2)).mul_(rotation)
                heads = qkv.view(B, 3, G, 1, D)
                q, kv = heads.select(1, 0), heads.narrow(1, 1, 2)
            k, v = cache.extend(layer, kv)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
            h = torch.addmm(h, y.reshape(B, heads_width), out_weight)
            x = torch.rms_norm(h, width, norm2, eps) if rms else torch.layer_norm(h, width, norm2, None, eps, False)
            if activation is None:
                # With s = u / sqrt(2), GELU is (s + s erf(s)) / sqrt(2), and a matmul takes factors for free.
                # F.gelu sets up a oneDNN primitive at each call: 16 microseconds a row instead of 8.
                s = torch.addmm(self._zero, x, up_weight, beta=0, alpha=ROOT)  # (B, d_ff)
                h = torch.addmm(h, torch.addcmul(s, s, torch.erf(s)), down_weight, alpha=ROOT)
            elif gate_weight is not None:
                u = torch.mm(x, up_weight).mul_(activation(torch.mm(x, gate_weight)))
                h = torch.addmm(h, u, down_weight)
            else:
                h = torch.addmm(h, activation(torch.mm(x, up_weight)), down_weight)
        norm = self._norm
        x = torch.rms_norm(h, width, norm, eps) if rms else torch.layer_norm(h, width, norm, None, eps, False)
        return torch.mm(x, self._head)

    @staticmethod
    def _biased_and_normed(qkv: torch.Tensor, block: BlockWeights) -> torch.Tensor:
        return block.normalized_heads(qkv.add_(block.biases["qkv"]) if "qkv" in block.biases else qkv)

    def _heads(self, qkv: torch.Tensor, rotation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate qkv (B, (H + 2 G) D) in place; return queries (B, G, H / G, D), keys and values (B, 2, G, 1, D).

        Queries that share a key head take the place of positions.
        """
        B, H, G, D = qkv.shape[0], self.config.H, self.config.kv_heads, self.config.D
        if G == H:  # one view for all three: splitting costs v0 5% of a token
            if rotation is not None:
                torch.view_as_complex(qkv.view(B, 3, G, D // 2, 2)).mul_(rotation)
            heads = qkv.view(B, 3, G, 1, D)
            return heads.select(1, 0), heads.narrow(1, 1, 2)
        if rotation is not None:
            torch.view_as_complex(qkv.view(B, H + 2 * G, D // 2, 2)).mul_(rotation)
        q, kv = qkv.split(self._sizes, dim=1)
        return q.view(B, G, -1, D), kv.view(B, 2, G, 1, D)

    def _embedded(self, ids: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The embedding (B, C) of the new tokens, and RoPE's factors at their positions. Advances the cache."""
        start = cache.advance(1)
        position = start if isinstance(start, int) else start[:, 0]
        h = F.embedding(ids, self._embedding)
        if self._positions is not None:
            h = h + self._positions[position]
        return h, None if self._rotation is None else self._rotation[position]
