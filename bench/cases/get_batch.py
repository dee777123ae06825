"""Batches of 32 x 256 bytes from three sources: ours beside the same draws in a plain loop over rows."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Work


def literal(sources: dict[str, bytes], *, p: dict[str, float], B: int, T: int, device: str, generator: Any) -> Any:
    """Return the batch of get_batch: one multinomial, then a randint and a tensor from a list for each row."""
    import torch

    names, xs, ys = list(p), [], []
    shares = torch.tensor([p[name] for name in names], dtype=torch.float32)
    for choice in torch.multinomial(shares, B, replacement=True, generator=generator).tolist():
        data = sources[names[choice]]
        start = int(torch.randint(0, len(data) - T, (1,), generator=generator))
        chunk = data[start : start + T + 1]
        xs.append(torch.tensor(list(chunk[:-1]), dtype=torch.int64))
        ys.append(torch.tensor(list(chunk[1:]), dtype=torch.int64))
    return torch.stack(xs).to(device), torch.stack(ys).to(device)


def _work(quick: bool, ours: bool) -> Work:
    import numpy as np
    import torch

    from niels_gpt import default_p_train, get_batch

    batch, calls = get_batch if ours else literal, 5 if quick else 300
    sources = {
        name: np.random.default_rng(0).bytes(int(share * 10_000_000)) for name, share in default_p_train().items()
    }
    generator = torch.Generator().manual_seed(0)

    def run() -> None:
        for _ in range(calls):
            batch(sources, p=default_p_train(), B=32, T=256, device="cpu", generator=generator)

    return Work(run, amount=calls)


OURS = Contender("niels-gpt", lambda quick: _work(quick, ours=True), role="ours", target=6.0)
CASE = Case("get_batch", "ms", (OURS, Contender("row by row", lambda quick: _work(quick, ours=False))))
