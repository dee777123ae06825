"""The chat formats of our own models: role ids for tokens, a transcript for bytes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from niels_gpt.chat.format import ChatPrompt, EncodedChat, Messages, check_continues, system_messages
from niels_gpt.chat.transcript import ROLES, STOPS, check_content, escape_content, first_kept, role_and_content
from niels_gpt.tokenizer import ByteTokenizer, Tokenizer, refuse_special

ROLE_NAMES = dict(zip(ROLES, ("sys", "usr", "asst"), strict=True))
"""Role -> name of its special token."""


class _TurnFormat(ABC):
    """A format in which a conversation is the ids of its turns, one after the other."""

    start: list[int]
    """The ids at the start of a reply."""

    @abstractmethod
    def turn(self, role: str, content: str) -> list[int]:
        """Return the ids of a message, in which special strings and turn tags are text."""

    @abstractmethod
    def learned_turn(self, role: str, content: str) -> list[int]:
        """Return the ids of a message in a conversation that is learned."""

    def encode(self, messages: Messages) -> EncodedChat:
        """See `ChatFormat.encode`."""
        ids: list[int] = []
        replies = []
        for number, message in enumerate(messages):
            turn = _turn_of(message, number, self.learned_turn)
            if message["role"] == "assistant":
                replies.append((len(ids) + len(self.start), len(ids) + len(turn)))
            ids += turn
        return EncodedChat(ids, replies)

    def fit(
        self, messages: Messages, limit: int, keep: int | None = None, *, continue_last: bool = False
    ) -> ChatPrompt:
        """See `ChatFormat.fit`."""
        if continue_last:
            check_continues(messages)
        turns = [_turn_of(message, number, self.turn) for number, message in enumerate(messages)]
        if continue_last:
            turns[-1].pop()
        start = [] if continue_last else self.start
        system, space = system_messages(messages), limit - len(start)
        first = first_kept([len(turn) for turn in turns], system, space, keep and keep - len(start))
        ids = [*itertools.chain(*turns[:system], *turns[first:]), *start]
        return ChatPrompt(ids, sum(map(len, turns[:system])))


def _turn_of(message: Mapping[str, str], number: int, encode: Callable[[str, str], list[int]]) -> list[int]:
    """Return the ids of a message. Raises ValueError that names it by its number."""
    role, content = role_and_content(message, number)
    try:
        return encode(role, content)
    except ValueError as err:
        raise ValueError(f"message {number} ({role}): {err}") from None


class RoleIdFormat(_TurnFormat):
    """Our tokenizer: `[role id] + content + [eot id]` for each message."""

    stops: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_token_ids()
        self._tokenizer = tokenizer
        self._roles = {role: special[name] for role, name in ROLE_NAMES.items()}
        self.end_ids = self.reply_ends = (special["eot"],)
        self.start = [special["asst"]]
        self.reply_start = (special["asst"],)

    def check(self, text: str) -> None:
        """Raise ValueError for text with a special string, or that is not encodable."""
        refuse_special(text)
        self._tokenizer.encode(text)

    def turn(self, role: str, content: str) -> list[int]:
        """Return `[role id] + content + [eot id]`."""
        return [self._roles[role], *self._tokenizer.encode_as_text(content), *self.end_ids]

    def learned_turn(self, role: str, content: str) -> list[int]:
        """Return the same. Raises ValueError for a content with a special string."""
        refuse_special(content)
        return self.turn(role, content)


class TranscriptFormat(_TurnFormat):
    """Bytes: lines `role: content`."""

    end_ids: tuple[int, ...] = ()
    reply_ends: tuple[int, ...] = ()
    stops = STOPS

    def __init__(self) -> None:
        self._tokenizer = ByteTokenizer()
        self.start = self._tokenizer.encode("assistant: ")
        self.reply_start = tuple(self.start)

    def check(self, text: str) -> None:
        """Raise ValueError for text that would start a turn, or that is not encodable."""
        check_content(text)
        self._tokenizer.encode(text)

    def turn(self, role: str, content: str) -> list[int]:
        """Return the line of a message; lines of the content that would start a turn are indented."""
        return self._tokenizer.encode(f"{role}: {escape_content(content)}\n")

    def learned_turn(self, role: str, content: str) -> list[int]:
        """Return the line of a message as it is; a reply ends with the line end."""
        return self._tokenizer.encode(f"{role}: {content}\n")
