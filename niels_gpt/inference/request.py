"""What an engine is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

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


class Event(NamedTuple):
    """New tokens of a request, at least one; `finished` with its last one."""

    request: Request
    tokens: list[int]
    finished: End | None
