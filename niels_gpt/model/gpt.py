"""The GPT: embedding, L pre-norm blocks of attention and MLP, a final norm, an output head.

This file is the reference, in plain torch. Faster implementations (`backend.py`) replace only the code that they know,
so an edit here takes effect everywhere. The defaults (LayerNorm, GELU) compute what a GPT-NeoX with sequential
residuals and no biases does; RMSNorm and SwiGLU, a Llama; learned positions, biases and `gelu_tanh`, a GPT-2; biases
or norms of queries and keys, Qwen2 and Qwen3. The tests compare it with all of them.

Shapes: B batch rows, n <= T positions, C width, H query heads, G key/value heads, D head width (C / H unless
`head_dim` is set), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.weights import BlockWeights, HeadSizes, ModelWeights, normalized_heads
from niels_gpt.model.backend import Backend, backend_of
from niels_gpt.model.dropout import Dropout
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.model.positions import token_positions
from niels_gpt.model.rope import RopeScaling, rope_cache, rotate
from niels_gpt.model.segments import Segments


class Context(NamedTuple):
    """What all blocks of one forward pass share."""

    backend: Backend
    rope: tuple[torch.Tensor, torch.Tensor] | None
    """sin and cos, (n, 1, D/2) or by row (B, n, 1, D/2); None: positions are learned."""
    cache: KVCache | None
    segments: Segments | None

    @property
    def plain_causal(self) -> bool:
        """Whether each row is one sequence: no cache, no segments, no positions by row."""
        return self.cache is None and self.segments is None and (self.rope is None or self.rope[0].dim() == 3)

    @property
    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """sin and cos (n, D/2) if `plain_causal`; None twice if positions are learned."""
        return (None, None) if self.rope is None else (self.rope[0].squeeze(1), self.rope[1].squeeze(1))

    def attend(self, qkv: torch.Tensor, heads: HeadSizes, layer: int) -> torch.Tensor:
        """The attention below, for backends that decline this one."""
        return attend(qkv, heads, layer, self)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # as in GPT-2; up to 5e-4 from the exact one
    "swiglu": F.silu,  # with a gate, as every name that ends in glu
}
"""By `model.mlp`. A new one is an entry here and a name in `ModelConfig.mlp`."""


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (x / sqrt(mean(x^2) + eps)), over the last dimension."""

    def __init__(self, width: int, eps: float, *, kind: str, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @classmethod
    def of(cls, config: ModelConfig) -> Norm:
        """A norm of the residual stream."""
        return cls(config.C, config.norm_eps, kind=config.norm, bias=config.bias and config.norm == "layernorm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "rmsnorm":
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention: each position reads the values of earlier ones, weighted by query-key similarity."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = HeadSizes(config.H, config.kv_heads, config.D)
        width = (config.H + 2 * config.kv_heads) * config.D
        self.qkv = nn.Linear(config.C, width, bias=config.qkv_bias or config.bias)
        self.norm_q = Norm(config.D, config.norm_eps, kind="rmsnorm") if config.qk_norm else None
        self.norm_k = Norm(config.D, config.norm_eps, kind="rmsnorm") if config.qk_norm else None
        self.out = nn.Linear(config.H * config.D, config.C, bias=config.bias)

    def forward(self, x: torch.Tensor, layer: int, context: Context) -> torch.Tensor:
        qkv = normalized_heads(self.qkv(x), self.heads, self.norm_q, self.norm_k)
        return self.out(attend(qkv, self.heads, layer, context))


def attend(qkv: torch.Tensor, heads: HeadSizes, layer: int, context: Context) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for all heads, concatenated (B, n, H D), of qkv (B, n, (H + 2 G) D)."""
    B, n, _ = qkv.shape
    H, G, D = heads
    # Token-major (B, n, heads, D): q and k are rotated together, and no transpose is copied.
    qk, v = qkv.view(B, n, H + 2 * G, D).split((H + G, G), dim=2)
    if context.rope is not None:
        qk = rotate(qk, *context.rope)
    if context.segments is not None:
        return context.segments.attend(qk, v)
    q, k, v = (t.transpose(1, 2) for t in (*qk.split((H, G), dim=2), v))  # (B, heads, n, D)
    mask = None
    if context.cache is not None:
        k, v = context.cache.extend(layer, torch.stack((k, v), dim=1))
        mask = context.cache.mask
    if G < H:  # grouped-query attention: H / G query heads read the same keys and values
        k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=context.cache is None and n > 1)
    return y.transpose(1, 2).reshape(B, n, H * D)


class MLP(nn.Module):
    """Two matrices with an activation between them; or three, where the activation of one gates another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.gate = nn.Linear(config.C, config.d_ff, bias=config.bias) if config.gated else None
        self.up = nn.Linear(config.C, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.C, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout on both branches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attn = Norm.of(config)
        self.attn = Attention(config)
        self.norm_mlp = Norm.of(config)
        self.mlp = MLP(config)
        self.drop = Dropout(config.dropout)

    def forward(self, x: torch.Tensor, layer: int, context: Context) -> torch.Tensor:
        attention, mlp = context.backend.branches(self)  # the two methods below, or faster forms of them
        x = x + self.drop(attention(x, layer, context))
        return x + self.drop(mlp(x))

    def attention_branch(self, x: torch.Tensor, layer: int, context: Context) -> torch.Tensor:
        return self.attn(self.norm_attn(x), layer, context)

    def mlp_branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm_mlp(x))

    def weights(self) -> BlockWeights:
        """The weights by role, for backends and decoders."""
        return BlockWeights.of(self)


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    `config` is a ModelConfig or a dict with its keys; ValueError if the sizes do not fit together.
    Weights start small (std 0.02, residual projections divided by sqrt(2L)), so that the untrained loss is near ln V;
    they come from torch's default generator.
    """

    sin: torch.Tensor
    cos: torch.Tensor
    checkpoint_activations = False
    """Whether training recomputes each block in the backward pass instead of storing its activations."""
    prepared_backend: Backend | None = None
    """Set by `backend.use_backend`."""
    sampled_ids: int | None = None
    """Only ids below this are generated; None: all V. The vocabulary of a tokenizer may be smaller than V."""

    def __init__(self, config: ModelConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config = ModelConfig.of(config)
        self.tok_emb = nn.Embedding(config.V, config.C)
        self.pos_emb = nn.Embedding(config.T, config.C) if config.positions == "learned" else None
        self.drop = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
        self.norm = Norm.of(config)
        self.lm_head = nn.Linear(config.C, config.V, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_emb.weight
        if config.positions == "rope":
            scaling = RopeScaling.of(config)
            sin, cos = rope_cache(config.T, config.D, theta=config.rope_theta, scaling=scaling)
            # (T, 1, D/2) broadcasts over (B, n, heads, D/2). Derived from the config, so not saved.
            self.register_buffer("sin", sin[0, 0, :, None], persistent=False)
            self.register_buffer("cos", cos[0, 0, :, None], persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * self.config.L) ** 0.5 if residual else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(p)

    def forward(
        self,
        x: torch.Tensor,
        *,
        cache: KVCache | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, n, V) for ids x (B, n), 1 <= n <= T.

        `cache`: the n tokens continue the sequences in the KVCache and are added to it.
        `segments` (B, n), integers: a position sees only earlier positions with the same id. Keep them on the CPU even
        for a model on a GPU; then nothing waits for the device.
        `positions` (B, n), integers in 0..T-1, for RoPE or the learned table; 0..n-1 by default.

        Raises ValueError for a length outside 1..T, for segments and positions of a wrong shape or type, or together
        with a cache. Values of positions on a GPU are not checked, because that would wait for it.
        """
        return self.logits(self.hidden(x, cache=cache, segments=segments, positions=positions))

    def loss(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        *,
        total: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Cross-entropy in nats at targets (B, n), summed and divided by `total`; by default by their number.

        Targets of -100 do not count.
        """
        return self.backend.loss(self, x, targets, total, segments=segments, positions=positions)

    def hidden(
        self,
        x: torch.Tensor,
        *,
        cache: KVCache | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The input of the head (B, n, C), after the final norm. For callers that need logits of few positions."""
        h, context = self.embed(x, cache, segments, positions)
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            h = checkpoint(block, h, layer, context, use_reentrant=False) if recompute else block(h, layer, context)
        return context.backend.norm(h, self.norm)

    def embed(
        self, x: torch.Tensor, cache: KVCache | None, segments: torch.Tensor | None, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, Context]:
        """The input of the first block (B, n, C), and the context of the forward pass. Advances the cache."""
        if x.dim() != 2 or not 1 <= x.shape[1] <= self.config.T:
            raise ValueError(f"expected ids of shape (B, n) with 1 <= n <= T={self.config.T}, got {tuple(x.shape)}")
        where = token_positions(x, self.config.T, cache, segments, positions)
        backend, rope, h = backend_of(self, blocks=True), None, self.tok_emb(x)
        if self.pos_emb is None:
            rope = self.sin[where], self.cos[where]
        else:
            h = h + (self.pos_emb.weight[where] if isinstance(where, slice) else self.pos_emb(where))
        h = self.drop(backend.embed(h))
        spans = None if segments is None else Segments(segments, device=x.device)
        return h, Context(backend, rope, cache, spans)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) for what `hidden` returned, or some positions of it (..., C)."""
        return self.backend.logits(h, self.lm_head)

    @property
    def backend(self) -> Backend:
        """What computes the final norm, the head and the loss; see `backend_of`."""
        return backend_of(self)

    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def weights(self) -> ModelWeights:
        """All weights by role, for decoders. Raises ValueError if the model has adapters."""
        return ModelWeights.of(self)

    @property
    def device(self) -> torch.device:
        return self.tok_emb.weight.device

    def num_parameters(self) -> int:
        """Number of weights, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())
