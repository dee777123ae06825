"""Batches of byte windows from several sources: plan which rows, then gather their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from niels_gpt.config.checks import check_probabilities

BytesSources = Mapping[str, bytes]


class RowPlan(NamedTuple):
    """Source and offset of each batch row. The plan is the provenance of a batch."""

    names: list[str]
    """Source names, in the order of p."""
    source: list[int]
    """Per row: index of its source in `names`."""
    start: list[int]
    """Per row: offset of its first byte in that source."""


def plan_batch(
    sources: BytesSources, *, p: Mapping[str, float], B: int, T: int, generator: torch.Generator | None = None
) -> RowPlan:
    """Draw B rows of T + 1 bytes: one multinomial for the sources, then one randint per row, in row order.

    The order of p counts: that of a run's config, so that its batches can be drawn again; `get_batch` sorts the names.

    Raises ValueError for probabilities that do not sum to 1, keys of p that differ from those of sources, sources
    shorter than T + 1 bytes, and B or T below 1.
    """
    if B < 1 or T < 1:
        raise ValueError(f"B and T must be at least 1, got B={B}, T={T}")
    if p.keys() != sources.keys():
        no_source = sorted(p.keys() - sources.keys())
        no_share = sorted(sources.keys() - p.keys())
        raise ValueError(
            f"p and sources must have the same keys; missing in sources: {no_source}, missing in p: {no_share}"
        )
    check_probabilities(p)
    short = {name: len(data) for name, data in sources.items() if len(data) < T + 1}
    if short:
        listed = ", ".join(f"{name} has {size}" for name, size in short.items())
        raise ValueError(f"sources shorter than T + 1 = {T + 1} bytes: {listed}")
    names = list(p)
    probabilities = torch.tensor([p[name] for name in names], dtype=torch.float32)
    source = torch.multinomial(probabilities, B, replacement=True, generator=generator).tolist()
    highs = [len(sources[name]) - T for name in names]  # exclusive: starts 0 .. len - (T + 1)
    # random_ on a slice of one tensor draws the same as randint(0, high, (1,)), without allocating a tensor per row.
    start = torch.empty(B, dtype=torch.int64)
    for slot, i in zip(start.split(1), source, strict=True):
        slot.random_(0, highs[i], generator=generator)
    return RowPlan(names, source, start.tolist())


def gather_rows(
    sources: BytesSources, plan: RowPlan, *, T: int, device: str | torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y), each (B, T) int64 on device: the bytes of every planned row; y is shifted by one byte."""
    arrays = [np.frombuffer(sources[name], dtype=np.uint8) for name in plan.names]
    rows = np.empty((len(plan.start), T + 1), dtype=np.uint8)
    for row, (i, start) in enumerate(zip(plan.source, plan.start, strict=True)):
        rows[row] = arrays[i][start : start + T + 1]
    x = torch.from_numpy(rows[:, :-1].astype(np.int64))
    y = torch.from_numpy(rows[:, 1:].astype(np.int64))
    return x.to(device), y.to(device)


def get_batch(
    sources: BytesSources,
    *,
    p: Mapping[str, float],
    B: int,
    T: int = 256,
    device: str | torch.device,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y), each (B, T) int64 on device: windows at random offsets of randomly chosen sources.

    `p` is the probability of each source, in any order: the names are sorted. y[:, j] == x[:, j + 1]. The same
    generator state gives the same batch; None is torch's default generator. Raises the errors of `plan_batch`.
    """
    plan = plan_batch(sources, p=dict(sorted(p.items())), B=B, T=T, generator=generator)
    return gather_rows(sources, plan, T=T, device=device)
