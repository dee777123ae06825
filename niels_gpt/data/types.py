"""What every loader yields: a text, or a chat. Raw; no tokens, no special markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class PretrainSample:
    """A document."""

    text: str
    source: str
    """The loader's name, such as `fineweb_edu`."""
    meta: dict[str, Any]
    """What else is known: the row's other fields, the dataset's revision."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation, in order."""

    messages: list[ChatMessage]
    source: str
    meta: dict[str, Any]
