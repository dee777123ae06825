"""Batches of 32 Levanter examples of 4,096 tokens, beside a loop that builds the named arrays of every example.

Runs in the environment of `make test WHAT=levanter`. The target is 20,000 examples per second, or 1.6 ms per batch.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bench.case import Case, Contender, Work

B, S, L = 32, 4096, 40_000


def _dataset() -> Any:
    import haliax as hax
    import jax
    import levanter  # noqa: F401  (missing: the case is skipped)
    import numpy as np

    from niels_gpt.levanter import SpliceDocumentDataset

    document = np.random.default_rng(1).integers(0, 16_000, L).astype(np.int32)
    options = {"Pos": hax.Axis("position", S), "rng_key": jax.random.PRNGKey(0), "shuffle": True, "epochs": None}
    return SpliceDocumentDataset(doc_tokens=document, pad_token_id=0, **options)


def _ours(quick: bool) -> Work:
    dataset, number = _dataset(), 5 if quick else 200

    async def batches() -> None:
        for i in range(number):
            await dataset.get_batch(range(i * B, (i + 1) * B))

    return Work(lambda: asyncio.run(batches()), amount=number)


def _example_by_example(quick: bool) -> Work:
    """The arrays of one example after the other, named by Levanter's constructors."""
    dataset, number = _dataset(), 2 if quick else 10
    import haliax as hax
    import numpy as np
    from levanter.models.lm_model import LmExample

    def example(index: int) -> Any:
        frame = dataset.core[index]
        tokens, segments = (hax.named(a, dataset.Pos) for a in (frame.tokens, frame.segment_ids))
        weights = hax.named(frame.loss_mask.astype(np.float32), dataset.Pos)
        return LmExample.causal(tokens, loss_weight=weights, segment_ids=segments)

    def run() -> None:
        for i in range(number):
            indices = dataset.core.order(0, range(i * B, (i + 1) * B))[0]
            for index in indices.tolist():
                example(index)

    return Work(run, amount=number)


CASE = Case(
    "levanter_batch",
    "ms",
    (
        Contender("niels-gpt", _ours, role="ours", goals={"ms": f"≤ {1000 * B / 20_000:g}"}, package="levanter"),
        Contender("example by example", _example_by_example, package="levanter"),
    ),
)
