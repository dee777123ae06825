"""The position of every token of a forward pass."""

from __future__ import annotations

import torch

from niels_gpt.model.kv_cache import KVCache


def token_positions(
    x: torch.Tensor, T: int, cache: KVCache | None, segments: torch.Tensor | None, positions: torch.Tensor | None
) -> slice | torch.Tensor:
    """The positions of the ids x (B, n): a slice if all rows share them, else (B, n). Advances the cache.

    Raises ValueError for segments or positions of another shape or type than integers (B, n), for positions outside
    0..T-1 (checked on the CPU only), and for either together with a cache.
    """
    n = x.shape[1]
    for name, ids in (("segments", segments), ("positions", positions)):
        if ids is None:
            continue
        if cache is not None:
            raise ValueError(f"{name} and a KV cache exclude each other: a cache continues one sequence per row")
        if ids.shape != x.shape or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            got = f"{ids.dtype} of shape {tuple(ids.shape)}"
            raise ValueError(f"{name} must be integers of the shape of the ids {tuple(x.shape)}, got {got}")
    if cache is not None:
        start = cache.advance(n)
        return slice(start, start + n) if isinstance(start, int) else start
    if positions is None:
        return slice(0, n)
    if positions.device.type == "cpu" and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= T:
            raise ValueError(f"positions must be in 0..{T - 1} (model.T={T}), got {low}..{high}")
    return positions.to(x.device, torch.int64, non_blocking=True)
