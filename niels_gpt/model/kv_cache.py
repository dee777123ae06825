"""Static KV cache: keys and values of all layers in one buffer that is allocated once."""

from __future__ import annotations

import torch

from niels_gpt.config import ModelConfig


class KVCache:
    """Room for `batch` sequences of up to T tokens each.

    Rows may have different lengths (`lengths`); then each row writes at its own place and a mask
    hides the others' longer part. `advance` is called once per forward pass, `extend` per layer.
    """

    def __init__(self, config: ModelConfig, batch: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.T = config.T
        shape = (batch, 2, config.H, config.T, config.D)  # keys at [:, 0], values at [:, 1]
        self.layers = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.L)]
        self.lengths: list[int] = [0] * batch
        self.mask: torch.Tensor | None = None  # (n, S) or (B, 1, n, S), True where a key may be seen
        self._end = 0
        self._write: int | torch.Tensor = 0

    def advance(self, n: int) -> int | torch.Tensor:
        """Make room for n more tokens in every row.

        Their position: an int where all rows begin at the same place, else (B, n).
        Raises ValueError when a row would grow past T.
        """
        starts, device = self.lengths, self.layers[0].device
        first, longest = starts[0], max(starts)
        self._end = longest + n
        if self._end > self.T:
            raise ValueError(f"the KV cache holds T={self.T} tokens; {longest} + {n} do not fit")
        self.lengths = [start + n for start in starts]
        if starts.count(first) == len(starts):
            self._write = first
            # One new token sees everything; several at once need the causal triangle.
            keys = None if n == 1 else torch.arange(self._end, device=device)
            self.mask = None if keys is None else keys <= keys[first:, None]  # (n, S)
        else:
            self._write = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)  # (B, n)
            keys = torch.arange(self._end, device=device)
            self.mask = (keys <= self._write[..., None])[:, None]  # (B, 1, n, S)
        return self._write

    def extend(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store kv (B, n, 2, H, D) of the new tokens; all keys and values so far, each (B, H, S, D)."""
        buffer, n = self.layers[layer], kv.shape[1]
        if isinstance(self._write, int):
            buffer.narrow(3, self._write, n).copy_(kv.permute(0, 2, 3, 1, 4))
        else:
            rows = torch.arange(kv.shape[0], device=kv.device)[:, None]  # (B, 1) with positions (B, n)
            buffer[rows, :, :, self._write] = kv
        k, v = buffer.narrow(3, 0, self._end).unbind(1)
        return k, v

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, device=self.layers[0].device, dtype=torch.int64)
        self.layers = [buffer.index_select(0, index) for buffer in self.layers]
        self.lengths = [self.lengths[row] for row in rows]
