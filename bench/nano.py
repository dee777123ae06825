"""A plain GPT written as nanoGPT does it: the reference of the benchmarks.

LayerNorm without bias, learned positions, causal attention through SDPA, GELU, a tied head, dropout on the embedding,
the attention weights and both residual branches. No hand-written fusion and no KV cache.

Shapes: B batch rows, n <= T positions, C width, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, C: int, H: int, dropout: float) -> None:
        super().__init__()
        self.H, self.dropout = H, dropout
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, n, C = x.shape
        q, k, v = (part.view(B, n, self.H, C // self.H).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, n, C))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, C: int, H: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.attention = Attention(C, H, dropout)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Nano(nn.Module):
    """The language model."""

    def __init__(self, *, V: int, T: int, C: int, L: int, H: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.T = T
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(C, H, dropout) for _ in range(L))
        self.norm = nn.LayerNorm(C, bias=False)
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if residual else 0.02)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the head (B, n, C) for ids (B, n)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (B, n, V)."""
        return self.head(self.hidden(ids))

    @torch.no_grad()
    def generate(
        self, ids: torch.Tensor, new: int, *, temperature: float = 1.0, top_k: int | None = None
    ) -> torch.Tensor:
        """Return ids (B, n + new); each token is computed from the last T. temperature 0 is greedy."""
        for _ in range(new):
            logits = self.head(self.hidden(ids[:, -self.T :])[:, -1])
            if temperature == 0.0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    least = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
                    logits = logits.masked_fill(logits < least, -torch.inf)
                chosen = torch.multinomial(logits.softmax(-1), num_samples=1)
            ids = torch.cat((ids, chosen), dim=1)
        return ids
