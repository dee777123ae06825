"""A model with 8 bits per weight, for decoding on a CPU: there a token costs what reading all weights costs.

At v1's size the products of one token take 3.4 ms so, and 9.3 ms in float32 (one thread). With many rows the time goes
into arithmetic, and float32 is faster again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from niels_gpt.inference.one_token import OneToken
from niels_gpt.model.gpt import GPT, SwiGLU
from niels_gpt.model.kv_cache import KVCache

MOST_ROWS = 8
"""Up to so many rows at a time int8 is faster."""

Packed = tuple[torch.Tensor, torch.Tensor]
"""int8 (N, K), and the scale of each row, bfloat16 (N,)."""


def pack(weight: torch.Tensor) -> Packed:
    """Rounded to multiples of a scale per row, of which the largest is at most 127."""
    scale = weight.abs().amax(dim=1).div(127).clamp(min=1e-30)
    up = scale.bfloat16()
    up = torch.where(up.float() < scale, torch.nextafter(up, torch.full_like(up, float("inf"))), up)
    return (weight / up.float()[:, None]).round().clamp_(-127, 127).to(torch.int8), up


class Int8GPT(GPT):
    """A GPT whose matrices are rounded to 8 bits. `of` makes one; its weights are the rounded ones, as float32."""

    packed: dict[torch.Tensor, Packed]
    """Each matrix as it is read by `Int8OneToken`."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: GPT) -> Int8GPT:
        """The same model with rounded matrices. Raises ValueError where it does not lie on a CPU, in float32."""
        weight = model.tok_emb.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            kind = f"{weight.dtype} on {weight.device.type}".removeprefix("torch.")
            raise ValueError(f"int8 weights are for float32 models on a CPU, not {kind}: leave the weights as they are")
        made = cls(model.config)
        made.load_state_dict(model.state_dict())
        made.train(model.training)
        made.packed = {}
        for name, p in made.named_parameters():
            if p.dim() > 1 and name != "pos_emb.weight":
                whole, scale = pack(p)
                made.packed[p] = whole, scale
                p.copy_(whole * scale.float()[:, None])
        return made


class Int8OneToken(OneToken):
    """`OneToken` with packed matrices, for few rows."""

    def __init__(self, model: Int8GPT) -> None:
        super().__init__(model)
        self._packed_head = model.packed[model.tok_emb.weight]
        self._packed = []
        for block in model.layers():
            mlp = block.mlp
            matrices = [block.attn.qkv, block.attn.out, mlp.up, mlp.down]
            if isinstance(mlp, SwiGLU):
                matrices.append(mlp.gate)
            packed = [model.packed[matrix.weight] for matrix in matrices]
            self._packed.append((block.norm_attn.weight, block.norm_mlp.weight, packed))

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,); the cache grows by it. No gradients."""
        B, C, H, D = ids.shape[0], self.config.C, self.config.H, self.config.D
        if B > MOST_ROWS:
            return super().__call__(ids, cache)
        position = cache.advance(1)
        where = position if isinstance(position, int) else position[:, 0]
        h = F.embedding(ids, self._embedding)
        if self._positions is not None:
            h = h + self._positions[where]
        turn = None if self._turn is None else self._turn[where]
        for layer, (norm1, norm2, (qkv, out, up, down, *gate)) in enumerate(self._packed):
            flat = _product(self._normed(h, norm1), qkv)
            if turn is not None:
                torch.view_as_complex(flat.view(B, 3, H, D // 2, 2)).mul_(turn)
            heads = flat.view(B, 3, H, 1, D)
            k, v = cache.extend(layer, heads.narrow(1, 1, 2))
            y = F.scaled_dot_product_attention(heads.select(1, 0), k, v, attn_mask=cache.mask)
            h = h + _product(y.reshape(B, C), out)
            x = self._normed(h, norm2).bfloat16()
            u = _product(x, up)
            h = h + _product(u.mul_(F.silu(_product(x, gate[0]))) if gate else F.gelu(u), down)
        return _product(self._normed(h, self._norm), self._packed_head)

    def _normed(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._rms:
            return torch.rms_norm(h, (self.config.C,), weight, self._eps)
        return torch.layer_norm(h, (self.config.C,), weight, None, self._eps, False)


def _product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return torch.ops.aten._weight_int8pack_mm(x.bfloat16(), *packed).float()


def one_token(model: GPT) -> OneToken:
    """The fastest way to continue rows by one token each."""
    return Int8OneToken(model) if isinstance(model, Int8GPT) else OneToken(model)
