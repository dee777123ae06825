"""A conversation with a model: keeps the turns, streams the replies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from niels_gpt.chat.transcript import STOPS, check_content, fit_messages, format_chat
from niels_gpt.inference.sampling import Sampling
from niels_gpt.inference.text import stream_text
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import encode


class Conversation:
    """The turns so far and the system message, over one model."""

    def __init__(
        self,
        model: GPT,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        self.model = model
        self.sampling = sampling or Sampling(temperature=0.3)
        self.generator = generator
        self.max_new_tokens = max_new_tokens
        self.turns: list[dict[str, str]] = []
        self.system: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Set the system message, or take it away. Raises ValueError for text that forges a turn."""
        if text:
            check_content(text)
        self.system = text or None

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns = []

    def prompt(self) -> str:
        """What the model reads: as many of the latest turns as leave it room to answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return format_chat(fit_messages([*head, *self.turns], limit=3 * self.model.config.T // 4))

    def reply(self, text: str) -> Iterator[str]:
        """Stream the answer to a user's message; both are remembered, also a reply that was broken off.

        Raises ValueError for an empty message, or one that forges a turn.
        """
        text = text.strip()
        if not text:
            raise ValueError("the message is empty")
        check_content(text)
        encode(text)  # refuses what has no bytes, before it is remembered
        self.turns.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in stream_text(
                self.model,
                self.prompt(),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                generator=self.generator,
                stop=STOPS,
            ):
                answer += piece
                yield piece
        finally:
            self.turns.append({"role": "assistant", "content": answer.strip()})
