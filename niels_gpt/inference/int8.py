"""A model with 8 bits per weight, for decoding on a CPU: there a token costs as much as reading all weights.

At v1's size the matmuls of one token take 3.4 ms with it, in float32 9.3 ms by torch and about 3.2 by the C kernels of
`native_one_token` (one thread, other machines): where those are used, it saves memory traffic but hardly time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from niels_gpt.inference.native_one_token import native_one_token
from niels_gpt.inference.one_token import Activation, OneToken, PlainOneToken
from niels_gpt.kernels.replaced import warn_once
from niels_gpt.model.backend import decodes
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache

MOST_ROWS = 8
"""The most rows at which int8 is faster."""

Packed = tuple[torch.Tensor, torch.Tensor]
"""int8 (N, K), and the scale of each row, bfloat16 (N,)."""


def pack(weight: torch.Tensor) -> Packed:
    """weight (N, K) rounded to -127..127 times a bfloat16 scale per row."""
    scale = weight.abs().amax(dim=1).div(127).clamp(min=1e-30)
    up = scale.bfloat16()
    up = torch.where(up.float() < scale, torch.nextafter(up, torch.full_like(up, float("inf"))), up)
    return (weight / up.float()[:, None]).round().clamp_(-127, 127).to(torch.int8), up


class Int8GPT(GPT):
    """A GPT whose matrices are rounded to 8 bits; made by `of`. Its weights are the rounded ones, in float32."""

    packed: dict[torch.Tensor, Packed]
    """Each matrix in the form that `Int8OneToken` reads."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: GPT) -> Int8GPT:
        """A copy of a model with rounded matrices. Raises ValueError unless it is float32 on a CPU."""
        weight = model.tok_emb.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            kind = f"{weight.dtype} on {weight.device.type}".removeprefix("torch.")
            raise ValueError(
                f"int8 weights are for float32 models on a CPU, not {kind}: use float32 weights, or the device cpu"
            )
        rounded = cls(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.train(model.training)
        weights = rounded.weights()
        rounded.packed = {}
        for matrix in (weights.head, *(matrix for block in weights.blocks for matrix in block.matrices())):
            ints, scale = rounded.packed[matrix] = pack(matrix)
            matrix.copy_(ints * scale.float()[:, None])
        rounded.sampled_ids = model.sampled_ids
        return rounded


class Int8OneToken(OneToken):
    """`OneToken` with packed matrices, for few rows."""

    exact = False  # activations are rounded to bfloat16

    def __init__(self, model: Int8GPT) -> None:
        super().__init__(model)
        self._float32 = native_one_token(model) or OneToken(model)
        packed, weights = model.packed, model.weights()
        ints, scale = packed[model.lm_head.weight]
        self._packed_head = ints[: model.sampled_ids], scale[: model.sampled_ids]
        self._packed: list[tuple[torch.Tensor, torch.Tensor, list[Packed], Packed | None, Activation]] = [
            (
                block.norm_attn.weight,
                block.norm_mlp.weight,
                [packed[matrix] for matrix in (block.qkv, block.out, block.up, block.down)],
                None if block.gate is None else packed[block.gate],
                block.activation,
            )
            for block in weights.blocks
        ]

    def __call__(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, V) for one more id per row (B,), which is added to the cache. No gradients."""
        B, options = ids.shape[0], self._options
        if B > MOST_ROWS:
            return self._float32(ids, cache)
        h, rotation = self._embedded(ids, cache)
        for layer, (norm1, norm2, (qkv_weight, out, up, down), gate, activation) in enumerate(self._packed):
            qkv = _matmul(self._normed(h, norm1), qkv_weight)
            if options is not None:
                qkv = self._biased_and_normed(qkv, options[layer])
            q, kv = self._heads(qkv, rotation)
            k, v = cache.extend(layer, kv)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
            h = h + _matmul(y.reshape(B, -1), out)
            x = self._normed(h, norm2).bfloat16()
            u = _matmul(x, up)
            h = h + _matmul(activation(u) if gate is None else u.mul_(activation(_matmul(x, gate))), down)
        return _matmul(self._normed(h, self._norm), self._packed_head)

    def _normed(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._rms:
            return torch.rms_norm(h, (self.config.C,), weight, self._eps)
        return torch.layer_norm(h, (self.config.C,), weight, None, self._eps, False)


def _matmul(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return torch.ops.aten._weight_int8pack_mm(x.bfloat16(), *packed).float()


def one_token(model: GPT) -> OneToken | PlainOneToken:
    """The fastest forward pass for one token per row of a model."""
    if isinstance(model, Int8GPT):
        if decodes("int8", model):
            return Int8OneToken(model)
        warn_once("int8 weights are rounded to 8 bits, but plain torch computes them in float32, which is slower")
    return (native_one_token(model) or OneToken(model)) if decodes("one-token", model) else PlainOneToken(model)
