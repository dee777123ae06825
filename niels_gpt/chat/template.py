"""The chat template for models over SentencePiece tokens: messages to ids.

A message is `[role id] + encode(content) + [eot id]`; a prompt for generation ends with the assistant id. No text can
produce the special ids (`refuse_special`), so nothing is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from niels_gpt.chat.transcript import ROLES, first_kept, role_and_content
from niels_gpt.tokenizer.special import refuse_special

ROLE_NAMES = dict(zip(ROLES, ("sys", "usr", "asst"), strict=True))
"""Role -> name of its special token."""


class TokenizerLike(Protocol):
    """The tokenizer interface that the template and the cache builders use."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...
    def special_token_ids(self) -> dict[str, int]: ...


def encode_turns(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[list[int]]:
    """Return the ids of each message. Raises as `encode_chat` does."""
    special = tokenizer.special_token_ids()
    encoded = []
    for number, message in enumerate(messages):
        role, content = role_and_content(message, number)
        try:
            refuse_special(content)
        except ValueError as err:
            raise ValueError(f"message {number} ({role}): {err}") from None
        encoded.append([special[ROLE_NAMES[role]], *tokenizer.encode(content), special["eot"]])
    return encoded


def encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """Return the ids of a conversation.

    Raises ValueError for a message with an unknown role, without content, or with a special string in it.
    """
    return [i for ids in encode_turns(messages, tokenizer) for i in ids]


def encode_prompt(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """Return the ids of a conversation and the start of the next assistant turn. Raises as `encode_chat` does."""
    return [*encode_chat(messages, tokenizer), tokenizer.special_token_ids()["asst"]]


def fit_chat(
    messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike, limit: int, keep: int | None = None
) -> list[int]:
    """Return the prompt of the latest messages that fit into `limit` ids; older turns are dropped.

    With `keep`, they are dropped in larger steps; see `first_kept`. A leading system message and the last message are
    always kept, whatever their length; the model then crops the prompt at its start.
    """
    encoded = encode_turns(messages, tokenizer)
    system = 1 if messages and messages[0].get("role") == "system" else 0
    start = first_kept([len(ids) for ids in encoded], system, limit - 1, keep and keep - 1)  # 1: the assistant's id
    return [*(i for ids in encoded[:system] + encoded[start:] for i in ids), tokenizer.special_token_ids()["asst"]]
