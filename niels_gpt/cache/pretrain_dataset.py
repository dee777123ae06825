"""Random windows over the shards of a token stream."""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np
import torch

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.token_stream import TokenStream


class PretrainTokenStreamDataset(TokenStream):
    """The windows of T + 1 tokens of a folder of shards; every start in every shard is equally likely."""

    def __init__(
        self,
        shards_dir: str | Path,
        *,
        T: int,
        device: str | torch.device,
        tokenizer_sha256: str | None = None,
        verify: bool = False,
    ) -> None:
        """Open the shards without reading them (verify: read and hash all).

        Without a meta.json in the parent folder, they are used as they are.

        Raises CacheError (a ValueError) for shards that are missing, truncated, or of another dtype or tokenizer, and
        if no shard has T + 1 tokens.
        """
        if T < 1:
            raise ValueError(f"T must be at least 1, got {T}")
        self.T, self.device = T, device
        super().__init__(shards_dir, tokenizer_sha256=tokenizer_sha256, verify=verify)
        windows = [max(shard.size - T, 0) for shard in self.shards]
        self._ends = np.cumsum(windows, dtype=np.int64).tolist()
        """Shard -> number of windows up to its end."""
        self._shifts = [shard.size - T - end for shard, end in zip(self.shards, self._ends, strict=True)]
        """Shard -> difference between the offset of a window in the shard and its index."""
        self.num_windows: int = self._ends[-1] if self._ends else 0
        if not self.num_windows:
            longest = max((shard.size for shard in self.shards), default=0)
            raise CacheError(
                f"{self.folder} has no window of T + 1 = {T + 1} tokens ({len(self.shards)} shards, the longest has "
                f"{longest} tokens): use more text or a smaller T"
            )

    def get_batch(self, *, B: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y), each (B, T) int64 on the device: windows at random offsets; y is shifted by one token.

        The same generator state gives the same batch.
        """
        x, y = self.gather(self.plan(B, generator))
        return x.to(self.device), y.to(self.device)

    def plan(self, B: int, generator: torch.Generator | None) -> list[int]:
        """Indices of B windows, drawn uniformly from 0 .. num_windows - 1."""
        if B < 1:
            raise ValueError(f"B must be at least 1, got {B}")
        drawn: list[int] = torch.randint(self.num_windows, (B,), generator=generator).tolist()
        return drawn

    def gather(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y) of windows, each (len(windows), T) int64 on the CPU."""
        itemsize = self.dtype.itemsize
        width = itemsize * (self.T + 1)
        ends, shards, shifts = self._ends, self.shards, self._shifts
        slices = []
        for window in windows:
            i = bisect.bisect_right(ends, window)
            start = itemsize * (window + shifts[i])
            slices.append(shards[i].read(start, start + width))
        rows = np.frombuffer(b"".join(slices), dtype=self.dtype).reshape(len(windows), self.T + 1)
        self._files.touched(len(windows), width)
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))

    def file(self, window: int) -> Path:
        """The shard that holds a window."""
        return self.shards[bisect.bisect_right(self._ends, window)].path

    def position(self, window: int) -> int:
        """Offset of a window's first token in the stream."""
        i = bisect.bisect_right(self._ends, window)
        return self._bounds[i] + window + self._shifts[i]

    def locate(self, window: int) -> tuple[int, int]:
        """(document, offset within it) of a window's first token. Raises CacheError without documents.npy."""
        starts = self.documents
        offset = self.position(window)
        document = max(int(np.searchsorted(starts, offset, side="right")) - 1, 0)
        return document, offset - int(starts[document])
