"""Log-probabilities of tokens, for readers who look inside a text: each with its alternatives and the entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from niels_gpt.inference.sampling import check_finite
from niels_gpt.model.backend import halves
from niels_gpt.model.eval_mode import evaluating
from niels_gpt.model.gpt import GPT

POSITIONS = 128
"""Positions whose logits are in memory at once, when a prompt is scored."""


class TokenLogprobs(NamedTuple):
    """A token, its log-probability in nats, the most likely tokens at its position, and the entropy there in nats.

    The distribution is the model's own: temperature 1, before penalties, biases and filters.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """(id, log-probability), the most likely first."""
    entropy: float


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """Return one `TokenLogprobs` per row of logits (B, V), for a token and a number of alternatives per row.

    Raises FloatingPointError for rows whose logits are nan or infinite.
    """
    wide = logits.float() if logits.device.type == "mps" else logits.double()  # MPS has no float64
    logp = wide.log_softmax(dim=-1)
    entropies = torch.special.entr(logp.exp()).sum(dim=-1)
    check_finite(entropies)
    entropy = entropies.tolist()
    chosen = logp[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    best = logp.topk(min(max(top), logp.shape[-1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(token, chosen[row], list(zip(ids[row][:k], values[row][:k], strict=True)), entropy[row])
        for row, (token, k) in enumerate(zip(tokens, top, strict=True))
    ]


@torch.inference_mode()
def prompt_logprobs(model: GPT, ids: Sequence[int], top: int = 0) -> list[TokenLogprobs]:
    """Return the `TokenLogprobs` of every id but the first, which nothing predicts: len(ids) - 1 of them.

    Raises ValueError for more than T ids.
    """
    T = model.config.T
    if len(ids) > T:
        raise ValueError(f"log-probabilities of a prompt need at most T={T} tokens, got {len(ids)}: shorten it")
    return score_from(model, ids, 1, top) if len(ids) > 1 else []


@torch.inference_mode()
def score_from(model: GPT, ids: Sequence[int], first: int, top: int = 0) -> list[TokenLogprobs]:
    """Return the `TokenLogprobs` of ids[first:], each predicted from all ids before it: at most T."""
    with evaluating(model):
        hidden, head = halves(model)
        h = hidden(torch.tensor([ids[:-1]], device=model.device))[0, first - 1 :]  # (n - first, C)
        result = []
        for start in range(0, len(h), POSITIONS):
            logits = head(h[start : start + POSITIONS])[:, : model.sampled_ids]
            result += token_logprobs(logits, ids[first + start : first + start + len(logits)], [top] * len(logits))
    return result
