"""A batch of byte windows: niels_gpt.get_batch beside the same procedure written out row by row."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Work

SIZES = {"wiki": 8_000_000, "roam": 1_000_000, "primer": 100_000}
"""Bytes per source."""


def literal(sources: dict[str, bytes], *, p: dict[str, float], B: int, T: int, device: str, generator: Any) -> Any:
    """The batch of get_batch: one multinomial, one randint per row, each row a tensor of a list."""
    import torch

    names = list(p)
    shares = torch.tensor([p[name] for name in names], dtype=torch.float32)
    xs, ys = [], []
    for choice in torch.multinomial(shares, B, replacement=True, generator=generator).tolist():
        data = sources[names[choice]]
        start = torch.randint(0, len(data) - T, (1,), generator=generator).item()
        chunk = data[start : start + T + 1]
        xs.append(torch.tensor(list(chunk[:-1]), dtype=torch.int64))
        ys.append(torch.tensor(list(chunk[1:]), dtype=torch.int64))
    return torch.stack(xs).to(device), torch.stack(ys).to(device)


def _work(batch: Any, quick: bool) -> Work:
    import numpy as np
    import torch

    from niels_gpt.config import default_p_train

    calls = 5 if quick else 200
    bits = np.random.default_rng(0)
    sources = {name: bits.bytes(size) for name, size in SIZES.items()}
    p, generator = default_p_train(), torch.Generator().manual_seed(0)

    def run() -> None:
        for _ in range(calls):
            batch(sources, p=p, B=32, T=256, device="cpu", generator=generator)

    return Work(run, amount=calls)


def _ours(quick: bool) -> Work:
    from niels_gpt import get_batch

    return _work(get_batch, quick)


CASE = Case(
    "get_batch",
    "32 windows of 257 bytes from three sources",
    "ms",
    (
        Contender("niels-gpt", _ours, role="ours", at_least=6.0),
        Contender("the spec, literally", lambda quick: _work(literal, quick)),
    ),
)
