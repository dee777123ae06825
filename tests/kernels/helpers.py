"""Models, batches, comparisons and plain operators that the tests of the kernels share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from niels_gpt.config import ModelConfig
from niels_gpt.model.gpt import GPT

SMALL = {"V": 70, "T": 24, "C": 32, "L": 2, "H": 2, "dropout": 0.0}
KINDS: list[dict[str, object]] = [
    {},
    {"positions": "learned"},
    {"norm": "rmsnorm", "mlp": "swiglu"},
    {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 1, "tie_embeddings": False, "rope_theta": 500.0},
    {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 1, "qkv_bias": True, "norm_eps": 1e-6, "rope_scale": 8.0},
    {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "head_dim": 24},
]
IDS = ["v0", "learned", "v1", "llama", "qwen2", "qwen3"]


def model_of(kind: dict[str, object], seed: int = 0, **sizes: object) -> GPT:
    """A model with norms away from 1 and weights three times their initial size, so that logits differ."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**{**SMALL, **kind, **sizes}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.3 * torch.rand_like(p) if p.dim() == 1 else 3)
    return model


def batch_of(seed: int = 1, B: int = 5, n: int = 24, V: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets), both (B, n); some targets are -100."""
    ids = torch.randint(V, (B, n + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[::2, ::3] = -100
    return ids[:, :-1], targets


def gradients(model: GPT) -> list[torch.Tensor]:
    """The gradients of a model, which are then reset."""
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def near(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Whether the largest difference is at most a share of the largest element."""
    return bool((found.float() - expected.float()).abs().max() <= share * expected.float().abs().max())


def head_of(V: int, N: int, C: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """(h, weight, targets of which a quarter is -100, number of the others)."""
    torch.manual_seed(0)
    h = torch.randn(N, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(V, C, device=device)).requires_grad_()
    y = torch.randint(V, (N,), device=device)
    y[::4] = -100
    return h, weight, y, (y >= 0).sum()


def rotated_heads(qkv, sin, cos, H):
    """`ops.rotated_heads` in plain torch."""

    def rotated(x):
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        s, c = sin[:, None], cos[:, None]
        return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype)

    G = (qkv.shape[2] - H) // 2
    q, k, v = qkv.split((H, G, G), dim=2)
    return rotated(q), rotated(k), v


def activation(u, gated):
    """`ops.activation` in plain torch."""
    return F.silu(u[..., : u.shape[-1] // 2]) * u[..., u.shape[-1] // 2 :] if gated else F.gelu(u)


def linear_cross_entropy(h, weight, targets, total, *, fp8=False):
    """`cross_entropy.linear_cross_entropy` in plain torch."""
    assert h.dtype == torch.bfloat16 and h.dim() == 2
    return F.cross_entropy(h.float() @ weight.t(), targets, reduction="sum") / total
