"""What every chat format offers: conversations as ids, with the replies to learn, and prompts for the next reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

Messages = Sequence[Mapping[str, str]]


class ChatPrompt(NamedTuple):
    """The ids that a model continues, of which the first `pinned` are the system message."""

    ids: list[int]
    pinned: int


class EncodedChat(NamedTuple):
    """A conversation as ids, and the ranges of the replies in it."""

    ids: list[int]
    replies: list[tuple[int, int]]
    """[begin, end) of what a model learns to say: each reply and the id that ends it."""


class ChatFormat(Protocol):
    """How a model reads conversations."""

    @property
    def end_ids(self) -> Sequence[int]:
        """The ids that end a reply."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a reply, besides `end_ids`."""

    @property
    def start(self) -> Sequence[int]:
        """The ids that `fit` appends to the turns, the same for all messages; empty if a template writes them."""

    @property
    def reply_start(self) -> Sequence[int]:
        """The ids after which a reply begins. Raises ValueError if replies cannot be told apart."""

    @property
    def reply_ends(self) -> Sequence[int]:
        """The ids that end a reply in a conversation that is learned. Raises as `reply_start`."""

    def check(self, text: str) -> None:
        """Raise ValueError for a message that cannot be encoded, or would forge a turn."""

    def encode(self, messages: Messages) -> EncodedChat:
        """Return a conversation as it is learned. Raises ValueError for one that this format cannot express."""

    def fit(
        self, messages: Messages, limit: int, keep: int | None = None, *, continue_last: bool = False
    ) -> ChatPrompt:
        """Return the prompt of the latest messages that fit into `limit` ids; older turns are dropped.

        With `keep`, they are dropped in larger steps; see `first_kept`. A leading system message and the last message
        are always kept. Turn tags and special strings in messages are text. The prompt ends with the start of a reply;
        with `continue_last` it ends inside the last message, which must be the assistant's.
        Raises ValueError for an unknown role, and for a content that is no string or not encodable.
        """


def check_continues(messages: Messages) -> None:
    """Raise ValueError if the last message is not the assistant's, which alone can be continued."""
    if not messages or messages[-1].get("role") != "assistant":
        raise ValueError("only an assistant's message can be continued: let the last message have the role assistant")


def system_messages(messages: Messages) -> int:
    """Return 1 if the first message is the system's, else 0."""
    return 1 if messages and messages[0].get("role") == "system" else 0


def find_replies(ids: np.ndarray, start: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return [begin, end) of each reply in the ids of one conversation: after `start`, to the first of `ends`.

    A reply without an end lasts to the end of the ids; a start inside a reply is part of it.
    """
    opens = np.flatnonzero(follows(ids, start)) + 1
    closes = np.flatnonzero(np.isin(ids, ends)) + 1
    replies: list[tuple[int, int]] = []
    for begin in opens.tolist():
        if replies and begin < replies[-1][1]:
            continue
        later = np.searchsorted(closes, begin, side="right")
        replies.append((begin, int(closes[later]) if later < len(closes) else len(ids)))
    return [(begin, end) for begin, end in replies if begin < end]


def follows(ids: np.ndarray, sequence: Sequence[int]) -> np.ndarray:
    """Return whether the ids up to each position end with a sequence: bool (n,)."""
    found = ids == sequence[-1]
    for back, i in enumerate(reversed(sequence[:-1]), start=1):
        found[:back] = False
        found[back:] &= ids[:-back] == i
    return found
