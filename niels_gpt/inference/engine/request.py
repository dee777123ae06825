"""Requests to an engine, the events it returns, and the checks on prompts and lengths."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from niels_gpt.config import MOST_TOKENS
from niels_gpt.config.checks import check_int
from niels_gpt.inference.logprobs import TokenLogprobs
from niels_gpt.inference.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled"]
ContextOverflow = Literal["slide", "half"]
"""What to do past T. "slide": every token is computed from the last T tokens, which no cache can speed up. "half": the
older half of the context is dropped, the rest is read once, and decoding continues from the KV cache."""


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
    logprobs: int | None = None
    """Alternatives that each event reports per token; None: events have no log-probabilities."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of every prompt token but the first, if they were requested; filled when the request starts."""
    wants_prompt_logprobs: bool = False
    cached: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    pinned: int = 0
    """First tokens of the prompt that stay in the context when its older half is dropped."""
    dropped: int = 0
    """Tokens after the pinned ones that are no longer in the context."""
    slot: int = -1
    read: int = 0
    """Tokens of the context that are in the KV cache."""
    loaded: int = 0
    """Those of them that were copied from the prefix cache."""
    launched: int = 0
    """New tokens that were launched; some of them may not have been received yet."""
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token is in the continuation; counted only if there are penalties."""
    seen: set[int] = field(init=False)
    """The tokens in `ids`; kept only if there is a repetition penalty."""
    penalized: bool = field(init=False)
    simple: bool = field(init=False)
    """Whether it needs only tokens, chosen from the model's own logits, which is what graphs compute."""

    def __post_init__(self) -> None:
        self.penalized = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        self.seen = set(self.ids) if self.sampling.penalized else set()
        adjusted = self.penalized or self.sampling.penalized or bool(self.logit_bias)
        self.simple = self.logprobs is None and not adjusted

    @property
    def tokens(self) -> list[int]:
        """The continuation so far."""
        return self.ids[self.prompt_length :]

    @property
    def draw(self) -> float:
        """The uniform draw of the next token that is launched."""
        return float(self.uniform.numpy()[self.launched])  # a third of the time of `uniform[i].item()`

    @property
    def received(self) -> int:
        """Number of new tokens in `ids`."""
        return len(self.ids) - self.prompt_length

    @property
    def context(self) -> list[int]:
        """The tokens that the model sees: `ids` without those dropped."""
        return self.ids if not self.dropped else self.ids[: self.pinned] + self.ids[self.pinned + self.dropped :]

    @property
    def length(self) -> int:
        """Number of tokens in `context`."""
        return len(self.ids) - self.dropped

    @property
    def unread(self) -> int:
        """Tokens of the context that are still to be read. The last one is not read, but decoded from."""
        return self.length - 1 - self.read

    def drop_older_half(self, T: int) -> None:
        """Shorten the context to the pinned tokens and the newest, T // 2 in all; a quarter of T is always new."""
        self.dropped = dropped_at(len(self.ids), self.pinned, T)
        self.read = self.loaded = 0


def dropped_at(length: int, pinned: int, T: int) -> int:
    """Return how many tokens are dropped after the pinned ones, when a text of this length is shortened."""
    return max(length - max(T // 2, pinned + T // 4, pinned + 1), 0)


def most_pinned(pinned: int, prompt_length: int, T: int) -> int:
    """Return how many of the pinned tokens of a prompt stay."""
    return min(pinned, T // 2, prompt_length - 1)


class Event(NamedTuple):
    """New tokens of a request, at least one; `finished` is set with the last of them."""

    request: Request
    tokens: list[int]
    finished: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if the request asked for them."""


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


def check_penalty(name: str, value: float) -> float:
    """Return a penalty as a float. Raises ValueError unless it is a finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_logit_bias(bias: Mapping[int, float] | None, V: int) -> dict[int, float]:
    """Return the biases by id. Raises ValueError for an id outside 0..V-1 and a bias that is not finite."""
    return {
        check_int("logit_bias: an id of the vocabulary", token, 0, V - 1): check_penalty("a bias in logit_bias", value)
        for token, value in (bias or {}).items()
    }
