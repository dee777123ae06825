"""One GPT: embedding, L pre-norm blocks of attention and MLP, tied output head.

With the options of v0 (LayerNorm, GELU) it computes what a GPT-NeoX with sequential residuals and no biases does, with
those of v1 (RMSNorm, SwiGLU) what a Llama does, and v0 with learned positions what a GPT-2 does; the tests hold it to
all three.

Shapes: B rows, n <= T positions, C width, H heads of D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from niels_gpt.config import ModelConfig
from niels_gpt.kernels.cpu import ops as cpu_ops
from niels_gpt.kernels.cuda import attention as cuda_attention
from niels_gpt.kernels.cuda import ops as cuda_ops
from niels_gpt.kernels.fp8 import matmul as fp8
from niels_gpt.kernels.fp8 import quantize
from niels_gpt.model.dropout import Dropout
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.model.loss import loss_fn, summed_loss
from niels_gpt.model.rope import rope_cache, rotate
from niels_gpt.model.segments import Segments
from niels_gpt.system.allocator import keep_freed_memory

Turn = tuple[torch.Tensor, torch.Tensor] | None
"""sin and cos for RoPE; None where positions are learned and nothing is rotated."""

Eight = tuple[quantize.Matrix, quantize.Matrix] | None
"""The two matrices of a branch in FP8, where that is wanted."""


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Under bf16 autocast the result is float32, as with LayerNorm, and the product that follows casts it to bfloat16.
    """

    eps: float

    def __init__(self, C: int) -> None:
        super().__init__(C, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
            result: torch.Tensor = cpu_ops.RMSNormOnCPU.apply(x, self.weight, self.eps)
            return result
        return super().forward(x.float() if x.dtype == torch.bfloat16 != self.weight.dtype else x)


Norm = nn.LayerNorm | RMSNorm


def make_norm(config: ModelConfig) -> Norm:
    """The norm of `config.norm`, with a weight of ones and no bias."""
    return RMSNorm(config.C) if config.norm == "rmsnorm" else nn.LayerNorm(config.C, bias=False)


def normed(x: torch.Tensor, norm: Norm | None, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x), weight), to be multiplied; without a norm, as they are.

    In bf16 on CUDA the norm's own weight is multiplied into the matrix, not into x: its gradient then comes from the
    gradient of the matrix, and not from another pass over all activations.
    """
    if norm is None or not cuda_ops.in_bf16(x):
        return x if norm is None else norm(x), weight
    function = F.layer_norm if isinstance(norm, nn.LayerNorm) else F.rms_norm
    return function(x.float(), x.shape[-1:], eps=norm.eps), weight * norm.weight


class Attention(nn.Module):
    """Causal self-attention; with RoPE on queries and keys, unless positions are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.H, self.D = config.H, config.D
        self.qkv = cpu_ops.Linear(config.C, 3 * config.C)
        self.out = cpu_ops.Linear(config.C, config.C)

    def forward(
        self,
        x: torch.Tensor,
        norm: Norm,
        turn: Turn,
        layer: int,
        cache: KVCache | None,
        segments: Segments | None,
        eight: Eight = None,
    ) -> torch.Tensor:
        """Of norm(x)."""
        x, weight = normed(x, norm, self.qkv.weight)
        if eight is not None and cache is None and segments is None and (turn is None or turn[0].dim() == 4):
            sin, cos = (None, None) if turn is None else (table.view(x.shape[1], self.D // 2) for table in turn)
            return fp8.product(_causal(*fp8.heads(x, weight, eight[0], sin, cos, self.H)), self.out.weight, eight[1])
        qkv = cpu_ops.linear(x, weight) if eight is None else fp8.product(x, weight, eight[0])
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # Under bf16 autocast attention stays float32: on a CPU, SDPA's backward takes half the time so.
            with torch.autocast("cpu", enabled=False):
                y = self._attend(qkv.float(), turn, layer, cache, segments)
        else:
            y = self._attend(qkv, turn, layer, cache, segments)
        return self.out(y) if eight is None else fp8.product(y, self.out.weight, eight[1])

    def _attend(
        self, qkv: torch.Tensor, turn: Turn, layer: int, cache: KVCache | None, segments: Segments | None
    ) -> torch.Tensor:
        """What the heads bring back, side by side (B, n, C)."""
        B, n, _ = qkv.shape
        heads = qkv.view(B, n, 3, self.H, self.D)
        if cache is None and segments is None and (turn is None or turn[0].dim() == 4):
            sin, cos = (None, None) if turn is None else (table.view(n, self.D // 2) for table in turn)
            if sin is not None and cos is not None and cuda_ops.usable(qkv):
                if cuda_attention.usable(qkv, self.H):
                    return cuda_attention.attend(heads, sin, cos).flatten(2)
                return _causal(*cuda_ops.turned_heads(heads, sin, cos))
            if cpu_ops.attends(qkv, self.D):
                return cpu_ops.attend(heads, sin, cos)
        # Token-major (B, n, 3, H, D): q and k are rotated together, and no transpose is copied.
        qk, v = heads.split((2, 1), dim=2)
        if turn is not None:
            qk = rotate(qk, *turn)
        if segments is not None:
            return segments.attend(qk, v.squeeze(2))
        q, k = qk.transpose(1, 3).unbind(2)  # (B, H, n, D) each
        if cache is None:
            v = v.squeeze(2).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)  # scaled by 1/sqrt(D)
        else:
            k, v = cache.extend(layer, torch.stack((k, v.squeeze(2).transpose(1, 2)), dim=1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
        return y.transpose(1, 2).reshape(B, n, self.H * self.D)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of heads (B, n, H, D), side by side (B, n, H D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = cpu_ops.Linear(config.C, config.d_ff)
        self.down = cpu_ops.Linear(config.d_ff, config.C)

    def forward(self, x: torch.Tensor, norm: Norm | None = None, eight: Eight = None) -> torch.Tensor:
        """Of norm(x), or of x."""
        x, weight = normed(x, norm, self.up.weight)
        if eight is not None:
            return fp8.mlp(x, weight, self.down.weight, eight, gated=False)
        u = cpu_ops.linear(x, weight)
        return self.down(cuda_ops.activation(u, gated=False) if cuda_ops.usable(u) else cpu_ops.gelu(u))


class SwiGLU(nn.Module):
    """Three matrices: down(silu(gate(x)) * up(x)).

    One matrix for gate and up together is not faster on a CPU (at v1's widths and 8192 tokens there and back takes
    940 ms, together 1000; bf16: 188 and 214), but it is on CUDA.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = cpu_ops.Linear(config.C, config.d_ff)
        self.up = cpu_ops.Linear(config.C, config.d_ff)
        self.down = cpu_ops.Linear(config.d_ff, config.C)

    def forward(self, x: torch.Tensor, norm: Norm | None = None, eight: Eight = None) -> torch.Tensor:
        """Of norm(x), or of x."""
        if cuda_ops.in_bf16(x):
            x, weight = normed(x, norm, torch.cat((self.gate.weight, self.up.weight)))
            if eight is not None:
                return fp8.mlp(x, weight, self.down.weight, eight, gated=True)
            return self.down(cuda_ops.activation(F.linear(x, weight), gated=True))
        x = x if norm is None else norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout on both branches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attn = make_norm(config)
        self.attn = Attention(config)
        self.norm_mlp = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.drop = Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, turn: Turn, layer: int, cache: KVCache | None, segments: Segments | None
    ) -> torch.Tensor:
        attn, mlp = self._in_fp8() if fp8.on(x) else (None, None)
        x = x + self.drop(self.attn(x, self.norm_attn, turn, layer, cache, segments, attn))
        return x + self.drop(self.mlp(x, self.norm_mlp, mlp))

    def _in_fp8(self) -> tuple[Eight, Eight]:
        """The matrices of attention and MLP."""
        attn, mlp = self.attn, self.mlp
        into = [mlp.gate.weight, mlp.up.weight] if isinstance(mlp, SwiGLU) else [mlp.up.weight]
        qkv, out, up, down = quantize.matrices(
            [
                ([attn.qkv.weight], self.norm_attn.weight),
                ([attn.out.weight], None),
                (into, self.norm_mlp.weight),
                ([mlp.down.weight], None),
            ]
        )
        return (qkv, out), (up, down)


class GPT(nn.Module):
    """Decoder-only transformer over token ids.

    `config` is a ModelConfig or a dict with its keys; ValueError where the numbers do not fit.
    Weights start small (std 0.02, residual projections divided by sqrt(2L)), so that the untrained
    loss is near ln V; they come from torch's default generator.
    """

    sin: torch.Tensor
    cos: torch.Tensor
    checkpoint_activations = False
    """Whether training computes each block a second time in the backward pass instead of remembering it."""

    def __init__(self, config: ModelConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config = ModelConfig.of(config)
        self.tok_emb = nn.Embedding(config.V, config.C)
        self.pos_emb = nn.Embedding(config.T, config.C) if config.positions == "learned" else None
        self.drop = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
        self.norm = make_norm(config)
        self.lm_head = cpu_ops.Linear(config.C, config.V)
        self.lm_head.weight = self.tok_emb.weight
        if config.positions == "rope":
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

    def forward(
        self,
        x: torch.Tensor,
        *,
        cache: KVCache | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, n, V) for ids x (B, n), 1 <= n <= T.

        `cache`: the n tokens continue what the KVCache holds, and are added to it.
        `segments` (B, n), integers: a position sees only earlier ones of the same id. On the CPU also for a model on a
        GPU: so nothing waits for the device.
        `positions` (B, n), integers in 0..T-1, of a token for RoPE or the learned table; 0..n-1 by default.

        Raises ValueError for a length outside 1..T, for segments and positions that do not fit, or with a cache.
        Positions on a GPU are not looked at, because that would wait for it.
        """
        return self.lm_head(self.hidden(x, cache=cache, segments=segments, positions=positions))

    def loss(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        *,
        total: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The cross-entropy in nats at targets (B, n), summed and divided by `total`: by default their number.

        `loss_fn(forward(...), targets)`, but in bf16 on CUDA the logits of all positions never exist together.
        Targets of -100 do not count.
        """
        if cuda_ops.in_bf16(x):
            h = self.hidden(x, segments=segments, positions=positions).to(torch.bfloat16).flatten(0, 1)
            y = targets.flatten()
            total = (y >= 0).sum() if total is None else total
            return cuda_ops.linear_cross_entropy(h, self.lm_head.weight, y, total, eight=fp8.on(x))
        logits = self(x, segments=segments, positions=positions)
        return loss_fn(logits, targets) if total is None else summed_loss(logits, targets) / total

    def hidden(
        self,
        x: torch.Tensor,
        *,
        cache: KVCache | None = None,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the head reads: (B, n, C), after the last norm. For those who need the logits of few positions."""
        if x.dim() != 2 or not 1 <= x.shape[1] <= self.config.T:
            raise ValueError(f"expected ids of shape (B, n) with 1 <= n <= T={self.config.T}, got {tuple(x.shape)}")
        where = self._where(x, cache, segments, positions)
        inside = None if segments is None else Segments(segments, device=x.device)
        h = self.tok_emb(x)
        turn = None
        if self.pos_emb is None:
            turn = self.sin[where], self.cos[where]
        else:
            h = h + (self.pos_emb.weight[where] if isinstance(where, slice) else self.pos_emb(where))
        if cuda_ops.in_bf16(x):
            h = h.to(torch.bfloat16)  # and with it the residual stream: half the traffic between the products
        h = self.drop(h)
        remember = not (self.checkpoint_activations and self.training and torch.is_grad_enabled())
        for layer, block in enumerate(self.blocks):
            if remember:
                h = block(h, turn, layer, cache, inside)
            else:
                h = checkpoint(block, h, turn, layer, cache, inside, use_reentrant=False)
        return self.norm(h)

    def _where(
        self,
        x: torch.Tensor,
        cache: KVCache | None,
        segments: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> slice | torch.Tensor:
        """The positions of x: a slice where all rows share them, else (B, n). Makes room in the cache."""
        n, T = x.shape[1], self.config.T
        for name, given in (("segments", segments), ("positions", positions)):
            if given is None:
                continue
            if cache is not None:
                raise ValueError(f"{name} and a KV cache exclude each other: a cache continues one sequence per row")
            if given.shape != x.shape or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
                got = f"{given.dtype} of shape {tuple(given.shape)}"
                raise ValueError(f"{name} must be integers of the shape of the ids {tuple(x.shape)}, got {got}")
        if cache is not None:
            start = cache.advance(n)
            return slice(start, start + n) if isinstance(start, int) else start
        if positions is None:
            return slice(0, n)
        if positions.device.type == "cpu" and positions.numel():
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high >= T:
                raise ValueError(f"positions must lie in 0..{T - 1} (model.T={T}), got {low}..{high}")
        return positions.to(x.device, torch.int64, non_blocking=True)

    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def device(self) -> torch.device:
        return self.tok_emb.weight.device

    def num_parameters(self) -> int:
        """Number of weights, the tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of what the state dict of a GPT holds, in its order, without making one."""
    yield "tok_emb.weight", (config.V, config.C)
    if config.positions == "learned":
        yield "pos_emb.weight", (config.T, config.C)
    for layer in range(config.L):
        yield from ((f"blocks.{layer}.{name}.weight", shape) for name, shape in _block_shapes(config).items())
    yield "norm.weight", (config.C,)
    yield "lm_head.weight", (config.V, config.C)


def number_of_weights(config: ModelConfig) -> int:
    """Of a GPT that need not be made for it, the tied matrix counted once."""
    block = sum(map(math.prod, _block_shapes(config).values()))
    positions = config.T * config.C if config.positions == "learned" else 0
    return config.V * config.C + positions + config.L * block + config.C


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    C, wide = config.C, config.d_ff
    gate: dict[str, tuple[int, ...]] = {"mlp.gate": (wide, C)} if config.mlp == "swiglu" else {}
    heads: dict[str, tuple[int, ...]] = {"norm_attn": (C,), "attn.qkv": (3 * C, C), "attn.out": (C, C)}
    return heads | {"norm_mlp": (C,)} | gate | {"mlp.up": (wide, C), "mlp.down": (C, wide)}
