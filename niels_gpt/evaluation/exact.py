"""Exact evaluation: every byte of a stream scored once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from niels_gpt.evaluation.sampled import eval_mode
from niels_gpt.model.gpt import GPT


@dataclass(frozen=True)
class Score:
    """The loss of a model on a whole stream."""

    tokens: int
    """Bytes scored: all but the first, which has nothing before it."""
    nats_per_token: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)


def score_stream(
    model: GPT,
    stream: bytes,
    *,
    stride: int | None = None,
    batch: int = 32,
    device: str | torch.device | None = None,
) -> Score:
    """Score every byte of the stream but the first, once, in windows of the model's T.

    Windows start every `stride` bytes and score the bytes the one before did not reach. stride T (the
    default) is fastest; smaller ones give each byte at least T - stride bytes of context. Sums are in
    float64. Raises ValueError for a stream of fewer than two bytes, or a stride outside 1..T.
    """
    T = model.config.T
    stride = T if stride is None else stride
    if not 1 <= stride <= T:
        raise ValueError(f"stride must be in 1..T={T}, got {stride}")
    if len(stream) < 2:
        raise ValueError(f"a stream of {len(stream)} bytes has nothing to predict")
    device = model.device if device is None else device
    data = np.frombuffer(stream, dtype=np.uint8)
    n = len(data) - 1  # targets 1 .. n; a window over data[s : s+w+1] predicts targets s+1 .. s+w
    starts = list(range(0, max(n - T, 0) + 1, stride)) if n > T else [0]
    width = min(T, n)
    if starts[-1] + width < n:
        starts.append(n - width)  # the last window ends with the stream; its overlap is not scored twice
    total, done = 0.0, 0
    with eval_mode(model):
        for i in range(0, len(starts), batch):
            group = starts[i : i + batch]
            rows = torch.from_numpy(np.stack([data[s : s + width + 1] for s in group]).astype(np.int64)).to(device)
            logits = model(rows[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
            losses = losses.view(len(group), width).double().cpu()
            for s, row in zip(group, losses, strict=True):
                total += row[done - s :].sum().item()
                done = s + width
    return Score(tokens=n, nats_per_token=total / n)
