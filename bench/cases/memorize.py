"""P(z) over windows of 100 tokens with the v1 model, beside bare forward passes of the same shapes.

A document of 40,000 tokens has 7,981 windows; 256 of them are timed, which gives the same time per window. The target
is 1.3 times the time of a bare forward pass: a ratio of at least 1 / 1.3.
"""

from __future__ import annotations

from typing import Any

from bench.case import Case, Contender, Work

WINDOWS, N, P = 256, 100, 50


def _model(quick: bool) -> Any:
    import torch

    from niels_gpt import GPT, ModelConfig
    from niels_gpt.config import PRESETS

    torch.manual_seed(0)
    sizes = {"V": 500, "T": 128, "C": 32, "H": 2, "L": 1} if quick else {}
    return GPT(ModelConfig(**{**PRESETS["v1"], **({"d_ff": 64} if quick else {}), **sizes})).eval()


def _ids(quick: bool, V: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, V, 400 if quick else 5 * WINDOWS + N)


def _ours(quick: bool) -> Work:
    import numpy as np

    from niels_gpt.memorization.extraction import log_probabilities

    model = _model(quick)
    ids = _ids(quick, model.config.V)
    starts = np.arange(0, len(ids) - N, 5)[:WINDOWS]
    return Work(lambda: log_probabilities(model, ids, starts, window=N, prompt=P), amount=len(starts))


def _bare(quick: bool, batch: int) -> Work:
    import numpy as np
    import torch

    model = _model(quick)
    ids = _ids(quick, model.config.V)
    starts = np.arange(0, len(ids) - N, 5)[:WINDOWS]
    rows = torch.from_numpy(np.stack([ids[s : s + N - 1] for s in starts]))

    def run() -> None:
        with torch.inference_mode():
            for i in range(0, len(rows), batch):
                model(rows[i : i + batch])

    return Work(run, amount=len(rows))


CASE = Case(
    "memorize",
    "ms",
    (
        Contender("P(z)", _ours, role="ours", target=1 / 1.3),
        Contender("bare forward pass, 8 windows at a time", lambda quick: _bare(quick, 8)),
        Contender("bare forward pass, 32 windows at a time", lambda quick: _bare(quick, 32)),
    ),
)
