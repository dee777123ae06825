"""The samples that loaders yield: a text or a chat, without tokens or special markers."""

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
    """The other fields of the row, and the revision of the dataset."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation; messages are in order."""

    messages: list[ChatMessage]
    source: str
    meta: dict[str, Any]
