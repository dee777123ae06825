"""Exact evaluation: every byte or token of a stream scored once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from niels_gpt.evaluation.sampled import eval_mode
from niels_gpt.evaluation.scoring import score_rows, token_scores
from niels_gpt.model.gpt import GPT


@dataclass(frozen=True)
class Score:
    """The loss of a model on a whole stream."""

    tokens: int
    """Tokens scored: all but the first, which has nothing before it."""
    nats_per_token: float
    bytes: int | None = None
    """Of text that the scored tokens stand for; None: tokens are bytes."""

    @property
    def bits_per_byte(self) -> float:
        size = self.tokens if self.bytes is None else self.bytes
        return self.nats_per_token * self.tokens / (size * math.log(2))

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats_per_token)


WINDOWS = 4096
"""Of a stream, cut out at once."""


def score_stream(
    model: GPT,
    stream: bytes | np.ndarray,
    *,
    stride: int | None = None,
    batch: int = 0,
    token_sizes: np.ndarray | None = None,
    precision: str = "fp32",
) -> Score:
    """Score every byte of the stream (or every id of an array) but the first, once, in windows of the model's T.

    Windows start every `stride` tokens and score those the one before did not reach. stride T (the
    default) is fastest; smaller ones give each token at least T - stride tokens of context (those of the first window
    apart). Sums are in float64; `batch` and `precision` are as in `score_rows`. `token_sizes` says how many bytes of
    text each id stands for, for bits per byte. Raises ValueError for a stream of fewer than two tokens, or a stride
    outside 1..T.
    """
    T = model.config.T
    stride = T if stride is None else stride
    if not 1 <= stride <= T:
        raise ValueError(f"stride must be in 1..T={T}, got {stride}")
    if len(stream) < 2:
        raise ValueError(
            f"a stream of {len(stream)} {'bytes' if isinstance(stream, bytes) else 'tokens'} has nothing to predict"
        )
    data = np.frombuffer(stream, dtype=np.uint8) if isinstance(stream, bytes) else stream
    n = len(data) - 1  # targets 1 .. n; a window over data[s : s+w+1] predicts targets s+1 .. s+w
    width = min(T, n)
    starts = np.arange(0, n - width + 1, stride)
    if starts[-1] + width < n:
        starts = np.append(starts, n - width)  # the last window ends with the stream; its overlap is not scored twice
    reached = np.append(0, starts[:-1] + width)  # the last target that is scored before a window, which begins after it
    total = 0.0
    for i in range(0, len(starts), WINDOWS):
        part = starts[i : i + WINDOWS]
        rows = [data[s : s + width + 1] for s in part.tolist()]
        prompts = reached[i : i + WINDOWS] - part + 1
        total -= score_rows(model, rows, prompts, batch=batch, precision=precision)[0].sum()
    size = None if token_sizes is None else int(token_sizes[data[1:]].sum())
    return Score(tokens=n, nats_per_token=float(total) / n, bytes=size)


def score_examples(
    model: GPT,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    token_sizes: np.ndarray,
    precision: str = "fp32",
) -> Score:
    """Score every target of batches (x, targets); those of -100 do not count. Raises ValueError where there is none."""
    total, number, size = 0.0, 0, 0
    with eval_mode(model):
        for x, targets in batches:
            each, _ = token_scores(model, x.to(model.device), targets, precision=precision)
            total -= each.cpu().double().sum().item()
            scored = targets[targets != -100].numpy()
            number += len(scored)
            size += int(token_sizes[scored].sum())
    if not number:
        raise ValueError("there is no target to score")
    return Score(tokens=number, nats_per_token=total / number, bytes=size)
