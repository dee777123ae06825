"""The chat formats of our own models: role ids for tokens, a transcript for bytes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping

from niels_gpt.chat.format import ChatPrompt, EncodedChat, Messages, check_continues, system_messages
from niels_gpt.chat.template import ROLE_NAMES, encode_turns
from niels_gpt.chat.transcript import STOPS, check_content, escape_content, first_kept, role_and_content
from niels_gpt.tokenizer import ByteTokenizer, Tokenizer, refuse_special


class _TurnFormat(ABC):
    """A format in which a conversation is the ids of its turns, one after the other."""

    start: list[int]
    """The ids at the start of a reply."""

    @abstractmethod
    def turn(self, role: str, content: str) -> list[int]:
        """Return the ids of a message, in which special strings and turn tags are text."""

    def fit(
        self, messages: Messages, limit: int, keep: int | None = None, *, continue_last: bool = False
    ) -> ChatPrompt:
        """See `ChatFormat.fit`."""
        if continue_last:
            check_continues(messages)
        turns = [self._checked_turn(message, number) for number, message in enumerate(messages)]
        if continue_last:
            turns[-1].pop()
        start = [] if continue_last else self.start
        system, space = system_messages(messages), limit - len(start)
        first = first_kept([len(turn) for turn in turns], system, space, keep and keep - len(start))
        ids = [*itertools.chain(*turns[:system], *turns[first:]), *start]
        return ChatPrompt(ids, sum(map(len, turns[:system])))

    def _checked_turn(self, message: Mapping[str, str], number: int) -> list[int]:
        role, content = role_and_content(message, number)
        try:
            return self.turn(role, content)
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

    def encode(self, messages: Messages) -> EncodedChat:
        """See `ChatFormat.encode`. A message with a special string is refused."""
        ids: list[int] = []
        replies = []
        for message, turn in zip(messages, encode_turns(messages, self._tokenizer), strict=True):
            if message["role"] == "assistant":
                replies.append((len(ids) + 1, len(ids) + len(turn)))
            ids += turn
        return EncodedChat(ids, replies)


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

    def encode(self, messages: Messages) -> EncodedChat:
        """See `ChatFormat.encode`. Replies end with the line end; nothing is escaped."""
        ids: list[int] = []
        replies = []
        for number, message in enumerate(messages):
            role, content = role_and_content(message, number)
            turn = self._tokenizer.encode(f"{role}: {content}\n")
            if role == "assistant":
                replies.append((len(ids) + len(self.start), len(ids) + len(turn)))
            ids += turn
        return EncodedChat(ids, replies)
