"""Static KV cache: keys and values of all layers in two buffers that are allocated once."""

from __future__ import annotations

import torch

from niels_gpt.config import ModelConfig


class KVCache:
    """Room for `batch` sequences of up to T tokens each.

    Rows may have different lengths (`lengths`); then each row writes at its own place and a mask
    hides the others' longer part. `advance` is called once per forward pass, `extend` per layer.
    """

    def __init__(self, config: ModelConfig, batch: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.L, batch, config.H, config.T, config.D)
        self.T = config.T
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths: list[int] = [0] * batch
        self.mask: torch.Tensor | None = None  # (n, S) or (B, 1, n, S), True where a key may be seen
        self._end = 0
        self._write: int | torch.Tensor = 0

    def advance(self, n: int) -> torch.Tensor:
        """Make room for n more tokens in every row; their positions, (n,) or (B, n).

        Raises ValueError when a row would grow past T.
        """
        starts, device = self.lengths, self.k.device
        self._end = max(starts) + n
        if self._end > self.T:
            raise ValueError(f"the KV cache holds T={self.T} tokens; {max(starts)} + {n} do not fit")
        self.lengths = [start + n for start in starts]
        if len(set(starts)) == 1:
            self._write = starts[0]
            positions = torch.arange(starts[0], self._end, device=device)  # (n,)
            # One new token sees everything; several at once need the causal triangle.
            keys = torch.arange(self._end, device=device)
            self.mask = None if n == 1 else keys <= positions[:, None]  # (n, S)
        else:
            positions = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
            self._write = positions
            self.mask = (torch.arange(self._end, device=device) <= positions[..., None])[:, None]  # (B, 1, n, S)
        return positions

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v (B, H, n, D) of the new tokens; all keys and values so far, (B, H, S, D)."""
        k_all, v_all = self.k[layer], self.v[layer]
        if isinstance(self._write, int):
            k_all[:, :, self._write : self._end] = k
            v_all[:, :, self._write : self._end] = v
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]  # (B, 1) with positions (B, n)
            k_all[rows, :, self._write] = k.transpose(1, 2)
            v_all[rows, :, self._write] = v.transpose(1, 2)
        return k_all[:, :, : self._end], v_all[:, :, : self._end]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, device=self.k.device, dtype=torch.int64)
        self.k, self.v = self.k.index_select(1, index), self.v.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]
