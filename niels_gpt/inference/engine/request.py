"""What an engine is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from niels_gpt.config import MOST_TOKENS
from niels_gpt.config.checks import check_int
from niels_gpt.inference.sampling import Sampling

End = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
class Request:
    """A prompt, and what has become of it so far. Made by `Engine.submit`; only the engine writes to it."""

    ids: list[int]
    """The prompt and its continuation."""
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    uniform: torch.Tensor
    """One number per new token, float64 on the CPU, drawn beforehand."""
    finished: End | None = None
    """Why it has ended: a stop id (then its last token), max_new_tokens, or `Engine.cancel`."""
    slot: int = -1
    read: int = 0
    """Tokens of the prompt that are in the cache."""
    launched: int = 0
    """New tokens that are there or on their way."""

    @property
    def tokens(self) -> list[int]:
        """The continuation so far."""
        return self.ids[self.prompt_length :]

    @property
    def landed(self) -> int:
        """How many new tokens are there."""
        return len(self.ids) - self.prompt_length


def prompt_ids(prompt: Iterable[int], V: int, name: str = "the prompt") -> list[int]:
    """The ids of a prompt as ints. Raises ValueError for an empty one and for what is no id of the vocabulary."""
    what = f"{name}: an id of the vocabulary"
    ids = [check_int(what, i, 0, V - 1) for i in prompt]
    if not ids:
        raise ValueError(f"{name} is empty: give at least one token to continue")
    return ids


def new_tokens(number: int, low: int) -> int:
    """max_new_tokens as an int. Raises ValueError outside low..MOST_TOKENS."""
    return check_int("max_new_tokens", number, low, MOST_TOKENS)


class Event(NamedTuple):
    """New tokens of a request, at least one; `finished` with its last one."""

    request: Request
    tokens: list[int]
    finished: End | None
