"""A conversation with a model: stores the turns and streams the replies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from niels_gpt.chat.format import ChatPrompt
from niels_gpt.chat.formats import chat_format
from niels_gpt.inference.engine.prefix_cache import PrefixCache
from niels_gpt.inference.engine.request import ContextOverflow
from niels_gpt.inference.generation import stream_reply
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer


class Conversation:
    """The system message and the turns of a conversation with one model.

    The chat format of its tokenizer (`chat_format`) says what the model reads and what ends a reply. Replies are
    sampled at temperature 0.3 unless `sampling` is given; the arguments are those of `stream_text`, and
    `context_overflow` is that of `Engine`.

    The keys and values of up to T tokens are kept between turns, so that a turn reads only what is new. With
    `context_overflow="half"` a long conversation stays as fast as a short one: a reply that grows past T drops half of
    the context, and old turns are dropped many at a time, so that the following prompts begin alike. The system message
    stays (of one longer than T / 2, the first T / 2 tokens).
    """

    def __init__(
        self,
        model: GPT,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        max_new_tokens: int = 200,
        tokenizer: AnyTokenizer | None = None,
        context_overflow: ContextOverflow = "slide",
    ) -> None:
        self.model = model
        self.context_overflow = context_overflow
        self._prefixes = PrefixCache(model.config.T)
        self.tokenizer = tokenizer
        self.format = chat_format(tokenizer or ByteTokenizer())
        self.sampling = sampling or Sampling(temperature=0.3)
        self.generator = generator
        self.max_new_tokens = max_new_tokens
        self.turns: list[dict[str, str]] = []
        self.system: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Set the system message; None or "" removes it. Raises ValueError for text that forges a turn."""
        if text:
            self.format.check(text)
        self.system = text or None

    def reset(self) -> None:
        """Delete the turns; the system message stays."""
        self.turns = []

    def prompt(self) -> list[int]:
        """Return what the model reads: the latest turns that fit three quarters of T.

        With `context_overflow="half"`, turns are dropped until half of that is free.
        """
        return self._prompt().ids

    def _prompt(self) -> ChatPrompt:
        messages, limit = [*self._system_messages(), *self.turns], 3 * self.model.config.T // 4
        keep = limit // 2 if self.context_overflow == "half" else None
        return self.format.fit(messages, limit, keep)

    def _system_messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a reply: over bytes, the beginning of the next turn."""
        return self.format.stops

    def add_user(self, text: str) -> None:
        """Append a user's message to `turns`. Raises ValueError for an empty message, or one that forges a turn."""
        text = text.strip()
        if not text:
            raise ValueError("the message is empty")
        self.format.check(text)  # before it becomes a turn
        self.turns.append({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """Append a reply to `turns`."""
        self.turns.append({"role": "assistant", "content": text.strip()})

    def reply(self, text: str) -> Iterator[str]:
        """Stream the reply to a user's message and append both to `turns`, also if the stream is closed early.

        Raises ValueError as `add_user` does.
        """
        self.add_user(text)
        answer = ""
        prompt = self._prompt()
        try:
            for piece in stream_reply(
                self.model,
                prompt.ids,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                generator=self.generator,
                stop=self.stops,
                tokenizer=self.tokenizer,
                context_overflow=self.context_overflow,
                prefix_cache=self._prefixes,
                pinned=prompt.pinned,
            ):
                answer += piece
                yield piece
        finally:
            self.add_assistant(answer)
