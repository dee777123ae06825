"""Exact evaluation: score every byte or token of a stream once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from niels_gpt.evaluation.scoring import score_rows, token_scores
from niels_gpt.model.eval_mode import eval_mode
from niels_gpt.model.gpt import GPT


@dataclass(frozen=True)
class Score:
    """The loss of a model on a stream."""

    tokens: int
    """Tokens scored: all but the first, which has no context."""
    nats_per_token: float
    bytes: int | None = None
    """Bytes of text in the scored tokens; None if tokens are bytes."""

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of text."""
        size = self.tokens if self.bytes is None else self.bytes
        return self.nats_per_token * self.tokens / (size * math.log(2))

    @property
    def perplexity(self) -> float:
        """The perplexity per token."""
        return math.exp(self.nats_per_token)


WINDOWS = 4096
"""Windows of a stream that are cut at a time."""


def score_stream(
    model: GPT,
    stream: bytes | np.ndarray,
    *,
    stride: int | None = None,
    batch: int = 0,
    token_sizes: np.ndarray | None = None,
    precision: str = "fp32",
) -> Score:
    """Score every byte of a stream (or every id of an array) but the first, once, in windows of the model's T.

    Windows start every `stride` tokens, and each scores the tokens that the previous one did not reach. A stride of T
    (the default) is fastest; a smaller one is slower and gives every token after the first window at least T - stride
    tokens of context. Sums are in float64; `batch` and `precision` are as in `score_rows`. `token_sizes` holds the
    bytes of text per id, for bits per byte. Raises ValueError for a stream of fewer than two tokens, a stride outside
    1..T, and bytes for a model over subwords.
    """
    T = model.config.T
    if isinstance(stream, bytes | bytearray | memoryview) and model.config.V > 256:
        raise ValueError(
            f"the stream is bytes, but the model reads subwords (V={model.config.V}): pass "
            "np.array(run.tokenizer.encode(text)), and token_sizes=token_sizes(run.tokenizer) of niels_gpt.tokenizer"
        )
    stride = T if stride is None else stride
    if not 1 <= stride <= T:
        raise ValueError(f"stride must be in 1..T={T}, got {stride}")
    if len(stream) < 2:
        unit = "bytes" if isinstance(stream, bytes) else "tokens"
        raise ValueError(f"a stream of {len(stream)} {unit} has nothing to predict: it needs at least 2")
    data = np.frombuffer(stream, dtype=np.uint8) if isinstance(stream, bytes) else stream
    n = len(data) - 1  # targets 1 .. n; the window data[s : s+w+1] predicts targets s+1 .. s+w
    width = min(T, n)
    starts = np.arange(0, n - width + 1, stride)
    if starts[-1] + width < n:
        starts = np.append(starts, n - width)  # the last window ends with the stream
    reached = np.append(0, starts[:-1] + width)  # the last target that was scored before each window
    total = 0.0
    for i in range(0, len(starts), WINDOWS):
        chunk = starts[i : i + WINDOWS]
        rows = [data[s : s + width + 1] for s in chunk.tolist()]
        prompts = reached[i : i + WINDOWS] - chunk + 1
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
    """Score every target of batches (x, targets); -100 is ignored. Raises ValueError if there is no target."""
    total, tokens, size = 0.0, 0, 0
    with eval_mode(model):
        for x, targets in batches:
            log_p, _ = token_scores(model, x.to(model.device), targets, precision=precision)
            total -= log_p.cpu().double().sum().item()
            scored = targets[targets != -100].numpy()
            tokens += len(scored)
            size += int(token_sizes[scored].sum())
    if not tokens:
        raise ValueError("no target to score: every target is -100, or there are no batches")
    return Score(tokens=tokens, nats_per_token=total / tokens, bytes=size)
