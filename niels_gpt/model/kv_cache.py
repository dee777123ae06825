"""Static KV cache: keys and values of all layers in one buffer, allocated once."""

from __future__ import annotations

import torch

from niels_gpt.config import ModelConfig


class KVCache:
    """Keys and values of `batch` sequences of up to T tokens each.

    Rows may have different `lengths`: then each row writes at its own position, and a mask hides what is past its end.
    Call `advance` once per forward pass and `extend` once per layer; or `grow`, and write into the buffer.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Allocate `capacity` tokens per row, T by default; or use a `buffer` of that shape, from length 0."""
        self.T = config.T if capacity is None else capacity
        if buffer is None:
            # (L, B, 2, G, T, D) for G key/value heads: keys at [:, :, 0], values at [:, :, 1]
            buffer = torch.zeros((config.L, batch, 2, config.kv_heads, self.T, config.D), device=device, dtype=dtype)
        self.buffer = buffer
        self.lengths: list[int] = [0] * batch
        self.mask: torch.Tensor | None = None  # (n, S) or (B, 1, n, S): True where a key is visible
        self._write: torch.Tensor | None = None  # (B, n): positions of the new tokens, if rows differ
        # Views of the buffer per layer, made once per forward pass: slicing costs as much as a small matmul.
        self._slots: tuple[torch.Tensor, ...] = ()  # (B, 2, G, n, D): memory of the new tokens
        self._keys: tuple[torch.Tensor, ...] = ()  # (B, G, S, D)
        self._values: tuple[torch.Tensor, ...] = ()

    def advance(self, n: int) -> int | torch.Tensor:
        """Add n tokens to every row and return their positions: the first if all rows share it, else (B, n).

        Raises ValueError if a row would grow past T.
        """
        starts, device = self.grow(n), self.buffer.device
        first, end = starts[0], max(self.lengths)
        used = self.buffer.narrow(4, 0, end)
        self._keys, self._values = used.select(2, 0).unbind(0), used.select(2, 1).unbind(0)
        if starts.count(first) == len(starts):
            self._write = None
            self._slots = self.buffer.narrow(4, first, n).unbind(0)
            # One new token sees everything; several at once need the causal triangle.
            keys = None if n == 1 else torch.arange(end, device=device)
            self.mask = None if keys is None else keys <= keys[first:, None]  # (n, S)
            return first
        self._write = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
        self._slots = self.buffer.unbind(0)
        self.mask = (torch.arange(end, device=device) <= self._write[..., None])[:, None]  # (B, 1, n, S)
        return self._write

    def grow(self, n: int) -> list[int]:
        """Add n to the length of every row and return the lengths before. Raises ValueError if one would exceed T."""
        starts, longest = self.lengths, max(self.lengths)
        if longest + n > self.T:
            raise ValueError(f"the KV cache holds T={self.T} tokens; {longest} + {n} do not fit")
        self.lengths = [start + n for start in starts]
        return starts

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store kv (B, 2, G, n, D) of the new tokens and return all keys and values so far, each (B, G, S, D)."""
        if self._write is None:
            self._slots[layer].copy_(kv)
        else:
            rows = torch.arange(kv.shape[0], device=kv.device)[:, None]  # (B, 1) with positions (B, n)
            self._slots[layer][rows, :, :, self._write] = kv.permute(0, 3, 1, 2, 4)
        return self._keys[layer], self._values[layer]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, device=self.buffer.device, dtype=torch.int64)
        self.buffer = self.buffer.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]
