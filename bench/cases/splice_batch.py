"""Batches of 32 splice frames of 4,096 tokens, beside a loop that builds tensors example by example.

The target is 150,000 examples per second, or 0.213 ms per batch.
"""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Work

B, S, L = 32, 4096, 40_000


def _indices(quick: bool, n: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, n, (5 if quick else 200, B))


def _ours(quick: bool, K: int) -> Work:
    import numpy as np

    from niels_gpt.splice import SpliceDocumentDataset

    document = np.random.default_rng(1).integers(0, 16_000, L).astype(np.uint16)
    dataset = SpliceDocumentDataset(S=S, doc_tokens=document, pad_token_id=0, content_length=K)
    batches = _indices(quick, len(dataset))

    def run() -> None:
        for indices in batches:
            dataset.get_batch(indices)

    return Work(run, amount=len(batches))


def _one_by_one(quick: bool) -> Work:
    """Build three arrays per example, convert each to a tensor, then stack them."""
    import numpy as np
    import torch

    document = np.random.default_rng(1).integers(0, 16_000, L).astype(np.int32)
    batches = _indices(quick, L - S // 2 + 1)[: 5 if quick else 40]

    def example(t: int) -> tuple[Any, ...]:
        s = S - S // 2
        tokens, mask, segments = np.full(S, 0, dtype=np.int32), np.zeros(S, dtype=np.int32), np.zeros(S, dtype=np.int32)
        tokens[s:] = document[t : t + S // 2]
        mask[s : S - 1] = 1
        segments[s:] = 1
        return torch.tensor(tokens), torch.tensor(mask), torch.tensor(segments)

    def run() -> None:
        for indices in batches:
            rows = [example(int(t)) for t in indices]
            for column in zip(*rows, strict=True):
                torch.stack(column)

    return Work(run, amount=len(batches))


CASE = Case(
    "splice_batch",
    "ms",
    (
        Contender("niels-gpt, K = S", lambda quick: _ours(quick, S), role="ours", target=1000 * B / 150_000),
        Contender("niels-gpt, K = S/2", lambda quick: _ours(quick, S // 2), role="ours", target=1000 * B / 150_000),
        Contender("example by example", _one_by_one, role="baseline"),
    ),
)
