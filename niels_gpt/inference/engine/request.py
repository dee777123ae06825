"""Requests to an engine, the events it returns, and the checks on prompts and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from niels_gpt.config import MOST_TOKENS
from niels_gpt.config.checks import check_int
from niels_gpt.inference.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
class Request:
    """A prompt and its continuation so far. `Engine.submit` creates it; only the engine writes to it."""

    ids: list[int]
    """The prompt and its continuation."""
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    uniform: torch.Tensor
    """One uniform draw per new token, float64 on the CPU, drawn in advance."""
    finished: FinishReason | None = None
    """Why it ended: a stop id (then its last token), max_new_tokens, or `Engine.cancel`."""
    slot: int = -1
    read: int = 0
    """Tokens of the prompt that are in the KV cache."""
    launched: int = 0
    """New tokens that were launched; some of them may not have been received yet."""

    @property
    def tokens(self) -> list[int]:
        """The continuation so far."""
        return self.ids[self.prompt_length :]

    @property
    def received(self) -> int:
        """Number of new tokens in `ids`."""
        return len(self.ids) - self.prompt_length


class Event(NamedTuple):
    """New tokens of a request, at least one; `finished` is set with the last of them."""

    request: Request
    tokens: list[int]
    finished: FinishReason | None


def check_prompt(prompt: Iterable[int], V: int, name: str = "the prompt") -> list[int]:
    """Return the ids of a prompt as ints. Raises ValueError for an empty prompt or an id outside 0..V-1."""
    ids = list(prompt)
    if not ids:
        raise ValueError(f"{name} is empty: give at least one token to continue")
    if all(type(i) is int and 0 <= i < V for i in ids):  # ten times as fast as check_int for each
        return ids
    return [check_int(f"{name}: an id of the vocabulary", i, 0, V - 1) for i in ids]


def check_new_tokens(number: int, low: int) -> int:
    """Return max_new_tokens as an int. Raises ValueError outside low..MOST_TOKENS."""
    return check_int("max_new_tokens", number, low, MOST_TOKENS)
