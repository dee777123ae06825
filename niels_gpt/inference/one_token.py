"""The forward pass for one new token per row: `GPT.forward` with a cache, without its overhead.

At one token a v0 layer computes for about 90 microseconds; module calls, views and separate additions
cost as much again. Here the weights are at hand, queries and keys are rotated in place, keys and values
are stored in one copy, and each residual addition is part of the matrix product before it. The tests
hold it to the logits of `GPT.forward`.

Without MKL (ARM) several rows are multiplied with turned copies of the matrices: OpenBLAS takes 0.21 ms for 32 rows of
v0's qkv so, and 0.33 with the matrices as they lie; for one row it is the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from niels_gpt.model.gpt import GPT, SwiGLU
from niels_gpt.model.kv_cache import KVCache

ROOT = 0.5**0.5
"""1 / sqrt(2)."""
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Weights of a block, matrices as (inputs, outputs): norm, qkv, out, norm, gate (None: GELU), up, down."""


class OneToken:
    """Continues the rows of a cache by one token each."""

    def __init__(self, model: GPT) -> None:
        self.config = model.config
        self._embedding = model.tok_emb.weight
        self._head = model.lm_head.weight.t()
        self._norm = model.norm.weight
        self._eps = model.norm.eps
        self._rms = model.config.norm == "rmsnorm"
        self._zero = self._embedding.detach().new_zeros(1)
        self._positions = None if model.pos_emb is None else model.pos_emb.weight  # (T, C)
        self._turn: torch.Tensor | None = None
        if model.pos_emb is None:
            turn = torch.complex(model.cos, model.sin)  # (T, 1, 1, D/2)
            self._turn = torch.cat((turn, turn, torch.ones_like(turn)), dim=1)  # (T, 3, 1, D/2): v is not turned
        self._layers: list[Layer] = [
            (
                block.norm_attn.weight,
                block.attn.qkv.weight.t(),
                block.attn.out.weight.t(),
                block.norm_mlp.weight,
                block.mlp.gate.weight.t() if isinstance(block.mlp, SwiGLU) else None,
                block.mlp.up.weight.t(),
                block.mlp.down.weight.t(),
            )
            for block in model.layers()
        ]
        self._turned: tuple[list[Layer], torch.Tensor] | None = None
        self._version = -1  # of what the copies were made of
        matrices = [self._head, *(w for layer in self._layers for w in layer if w is not None)]
        self._counted = [w for w in matrices if not w.is_inference()]  # those made in inference mode count nothing

    def _weights(self, rows: int) -> tuple[list[Layer], torch.Tensor]:
        """The blocks' and the head's, as they are multiplied fastest with so many rows."""
        if rows == 1 or self._embedding.device.type != "cpu" or torch.backends.mkl.is_available():
            return self._layers, self._head
        version = sum(w._version for w in self._counted)  # it grows with every change in place
        if self._turned is None or version != self._version:
            layers: list[Any] = [tuple(w if w is None else w.contiguous() for w in layer) for layer in self._layers]
            self._turned, self._version = (layers, self._head.contiguous()), version
        return self._turned

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,); the cache grows by it. No gradients."""
        B, C, H, D, eps = ids.shape[0], self.config.C, self.config.H, self.config.D, self._eps
        width, half, rms = (C,), D // 2, self._rms
        position = cache.advance(1)
        where = position if isinstance(position, int) else position[:, 0]
        turn = None if self._turn is None else self._turn[where]
        h = F.embedding(ids, self._embedding)  # (B, C)
        if self._positions is not None:
            h = h + self._positions[where]
        # The branches below cost nothing that can be measured; functions chosen beforehand cost v0 0.5%.
        layers, head = self._weights(B)
        for layer, weights in enumerate(layers):
            norm1, qkv_weight, out_weight, norm2, gate_weight, up_weight, down_weight = weights
            x = torch.rms_norm(h, width, norm1, eps) if rms else torch.layer_norm(h, width, norm1, None, eps, False)
            flat = torch.mm(x, qkv_weight)  # (B, 3C)
            if turn is not None:
                torch.view_as_complex(flat.view(B, 3, H, half, 2)).mul_(turn)
            qkv = flat.view(B, 3, H, 1, D)
            k, v = cache.extend(layer, qkv.narrow(1, 1, 2))
            y = F.scaled_dot_product_attention(qkv.select(1, 0), k, v, attn_mask=cache.mask)  # (B, H, 1, D)
            h = torch.addmm(h, y.reshape(B, C), out_weight)
            x = torch.rms_norm(h, width, norm2, eps) if rms else torch.layer_norm(h, width, norm2, None, eps, False)
            if gate_weight is None:
                # GELU: of s = u / sqrt(2) it is (s + s erf(s)) / sqrt(2), and factors of a product cost nothing.
                # F.gelu sets up a oneDNN primitive at each call: 16 microseconds a row, not 8.
                s = torch.addmm(self._zero, x, up_weight, beta=0, alpha=ROOT)  # (B, d_ff)
                h = torch.addmm(h, torch.addcmul(s, s, torch.erf(s)), down_weight, alpha=ROOT)
            else:
                u = torch.mm(x, up_weight).mul_(F.silu(torch.mm(x, gate_weight)))
                h = torch.addmm(h, u, down_weight)
        norm = self._norm
        x = torch.rms_norm(h, width, norm, eps) if rms else torch.layer_norm(h, width, norm, None, eps, False)
        return torch.mm(x, head)
