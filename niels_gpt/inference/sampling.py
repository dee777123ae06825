"""Choose the next token from logits: repetition penalty, temperature, top-k, top-p, min-p."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from niels_gpt.config.checks import check_int

REPETITION_PENALTIES = (0.01, 100.0)
"""Smallest and largest repetition penalty: with these, logits stay finite."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Temperature 0 is greedy; None switches a filter off."""

    temperature: float = 0.9
    """Divides the logits: below 1 the distribution is sharper, above 1 flatter."""
    top_k: int | None = 50
    """Keep only the k most likely tokens; among equally likely ones those with the lower ids."""
    top_p: float | None = None
    """Keep only the smallest set of most likely tokens with at least this total probability."""
    min_p: float | None = None
    """Keep only tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides the logit of a token that stands in the prompt or the continuation, or multiplies it if it is negative
    (as in CTRL and transformers): above 1 repetitions become less likely, at 1 nothing changes."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is None and name in ("top_p", "min_p"):
                continue
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise ValueError(f"{name} must be a number, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_int("top_k (None for all tokens)", self.top_k))
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature!r}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        low, high = REPETITION_PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise ValueError(f"repetition_penalty must be in [{low:g}, {high:g}], got {self.repetition_penalty!r}")

    @property
    def penalized(self) -> bool:
        """Whether `choose` needs the tokens of each row so far."""
        return self.repetition_penalty != 1.0


def choose(
    logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor, seen: Sequence[Collection[int]] = ()
) -> torch.Tensor:
    """Return the next token of each row (B,), for logits (B, V) and one uniform draw in [0, 1) per row.

    `seen`: the tokens of each row so far, in any order, if there is a repetition penalty.
    The draw selects a token by inverse transform sampling. A row's token depends only on its own logits, tokens and
    draw, so decoding in a batch gives the same tokens as decoding alone.
    Raises FloatingPointError for rows whose logits are nan or infinite.
    """
    if sampling.penalized:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        largest, ids = logits.max(dim=-1)
        check_finite(largest)
        return ids
    cumulative = probabilities(logits, sampling).cumsum(dim=-1)  # (B, V)
    threshold = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
    check_finite(threshold)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def penalize_repetition(logits: torch.Tensor, seen: Sequence[Collection[int]], penalty: float) -> torch.Tensor:
    """Return a copy of logits (B, V), those of the tokens seen in each row divided (or multiplied) by the penalty."""
    V = logits.shape[1]  # a prompt may have ids that are never sampled
    pairs = [(row, token) for row, tokens in enumerate(seen) for token in tokens if token < V]
    rows, columns = torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 2).T
    before = logits[rows, columns]
    return logits.index_put((rows, columns), torch.where(before < 0, before * penalty, before / penalty))


def adjust(
    logits: torch.Tensor, counts: Mapping[int, int], *, presence: float, frequency: float, bias: Mapping[int, float]
) -> torch.Tensor:
    """Return a copy of logits (V,) with biases added and penalties subtracted.

    A token that has been generated `counts` times loses `presence` once, and `frequency` for each time.
    """
    change = dict(bias)
    if presence or frequency:
        for token, count in counts.items():
            change[token] = change.get(token, 0.0) - presence - frequency * count
    if not change:
        return logits
    index = torch.tensor(list(change), device=logits.device)
    return logits.index_add(0, index, torch.tensor(list(change.values()), device=logits.device, dtype=logits.dtype))


def check_finite(values: torch.Tensor, name: str = "logits") -> None:
    """Raise FloatingPointError if a model computed nan or infinity."""
    if not math.isfinite(values.sum().item()):  # one third of the time of isfinite().all()
        raise FloatingPointError(f"the {name} are nan or infinite: the weights are broken, use another checkpoint")


def _outside_top_k(p: torch.Tensor, k: int) -> torch.Tensor:
    """Return the mask (B, V) of all but the k most likely tokens; of equal ones the lower ids are inside."""
    kth = p.topk(k, dim=-1).values[:, -1:]
    outside = p < kth
    if outside.numel() - int(outside.sum()) > k * len(p):  # some row has more tokens like its k-th than fit
        tied = p == kth
        left = k - (p > kth).sum(dim=-1, keepdim=True)
        outside |= tied & (tied.cumsum(dim=-1) > left)
    return outside


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the unnormalized distribution (B, V) to sample from; temperature must be above 0.

    The dtype is float64, or float32 on MPS, which has no float64. Every filter sees the distribution after
    temperature; a token stays if all filters keep it.
    """
    logits = logits.float() if logits.device.type == "mps" else logits.double()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature  # no overflow near temperature 0
    p = logits.softmax(dim=-1)
    kept = p
    if sampling.top_k is not None and sampling.top_k < p.shape[-1]:
        kept = kept.masked_fill(_outside_top_k(p, sampling.top_k), 0.0)
    if sampling.min_p:
        kept = kept.masked_fill(p < sampling.min_p * p.amax(dim=-1, keepdim=True), 0.0)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # total probability of the more likely tokens
        outside = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, before >= sampling.top_p)
        kept = kept.masked_fill(outside, 0.0)
    return kept
