"""Rotary position embedding: the pair of dimensions 2i and 2i+1 rotates by the angle `pos * theta**(-2i/D)`.

As a complex number the pair rotates by one multiplication. It is computed so in float32 and float64; half precision has
no complex kernels and uses the formula with sine and cosine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from niels_gpt.config import ModelConfig


class RopeScaling(NamedTuple):
    """Llama 3's scaling of RoPE's frequencies for a context `factor` times as long as the `context` of pretraining."""

    factor: float
    low: float
    high: float
    context: int

    @classmethod
    def of(cls, config: ModelConfig) -> RopeScaling | None:
        """The scaling of a model; None if it has none."""
        if config.rope_scale == 1:
            return None
        return cls(config.rope_scale, config.rope_low, config.rope_high, config.rope_context)

    def __call__(self, frequency: torch.Tensor) -> torch.Tensor:
        """Divide slow frequencies by the factor, keep fast ones, interpolate between them."""
        turns = self.context * frequency / (2 * math.pi)  # rotations within the original context
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


def rope_cache(
    T: int,
    D: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sin, cos) for positions 0..T-1, each of shape (1, 1, T, D//2); cpu and float32 by default.

    Computed in float64 and then cast. Raises ValueError for an odd D.
    """
    if D % 2:
        raise ValueError(f"RoPE rotates pairs, so D must be even, got {D}")
    frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D)  # (D/2,)
    if scaling is not None:
        frequency = scaling(frequency)
    angle = torch.arange(T, dtype=torch.float64, device="cpu")[:, None] * frequency  # (T, D/2)
    return tuple(  # type: ignore[return-value]
        table[None, None].to(device=device or "cpu", dtype=dtype or torch.float32)
        for table in (angle.sin(), angle.cos())
    )


def rotate(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """x (..., D) with its neighboring pairs rotated; sin and cos (..., D/2) broadcast against it."""
    pairs = x.unflatten(-1, (-1, 2))  # (..., D/2, 2)
    if x.dtype in (torch.float32, torch.float64):
        even = pairs.stride(-1) == 1 and not any(s % 2 for s in (*pairs.stride()[:-1], pairs.storage_offset()))
        pairs = pairs if even else pairs.clone(memory_format=torch.contiguous_format)
        rotated = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        return torch.view_as_real(rotated).flatten(-2)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (B, H, T, D) rotated by the tables of `rope_cache` (1, 1, T, D//2).

    Shapes and dtypes are kept. Raises ValueError if shape, dtype or device do not match.
    """
    T, D = q.shape[-2:]
    if D % 2:
        raise ValueError(f"RoPE rotates pairs, so D must be even, got {D}")
    if k.shape[-2:] != q.shape[-2:] or k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} do not match")
    for name, table in (("sin", sin), ("cos", cos)):
        if table.shape != (1, 1, T, D // 2):
            raise ValueError(f"{name} must have shape (1, 1, {T}, {D // 2}), got {tuple(table.shape)}")
        if table.dtype != q.dtype or table.device != q.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}, but q is {q.dtype} on {q.device}")
    return rotate(q, sin, cos), rotate(k, sin, cos)
