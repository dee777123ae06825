"""The chat template: messages to ids and back, for models over SentencePiece tokens.

A message is `[role id] + encode(content) + [eot id]`; a prompt for generation ends with the assistant id alone. Turns
are made of ids that no text can produce (`refuse_special`), so nothing needs escaping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from niels_gpt.chat.transcript import ROLES
from niels_gpt.tokenizer.special import refuse_special

ROLE_NAMES = dict(zip(ROLES, ("sys", "usr", "asst"), strict=True))
"""Role -> the name of its special token."""


class TokenizerLike(Protocol):
    """What the template and the cache builders need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...
    def special_token_ids(self) -> dict[str, int]: ...


def check_message(message: Mapping[str, str], number: int = 0) -> None:
    """Raise ValueError for a message with an unknown role, without content, or with a special string in it."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; allowed are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"message {number} ({role}) needs a string as content, got {content!r}")
    try:
        refuse_special(content)
    except ValueError as err:
        raise ValueError(f"message {number} ({role}): {err}") from None


def _encode_each(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[list[int]]:
    special = tokenizer.special_token_ids()
    parts = []
    for number, message in enumerate(messages):
        check_message(message, number)
        role = special[ROLE_NAMES[message["role"]]]
        parts.append([role, *tokenizer.encode(message["content"]), special["eot"]])
    return parts


def encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """The ids of a whole conversation. Raises ValueError as `check_message` does."""
    return [i for part in _encode_each(messages, tokenizer) for i in part]


def encode_prompt(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """The ids that an assistant's next reply continues. Raises ValueError as `check_message` does."""
    return [*encode_chat(messages, tokenizer), tokenizer.special_token_ids()["asst"]]


def decode_chat(ids: Sequence[int], tokenizer: TokenizerLike) -> list[dict[str, str]]:
    """The messages of ids: what `encode_chat` encoded. A closing bare assistant id is a prompt, not a message.

    Raises ValueError for ids that do not begin with a role, for anything between a turn's end and the next role, and
    for a role inside a turn.
    """
    special = tokenizer.special_token_ids()
    roles = {special[name]: role for role, name in ROLE_NAMES.items()}
    messages: list[dict[str, str]] = []
    content: list[int] | None = None  # of the turn that is open
    for at, value in enumerate(int(i) for i in ids):
        if content is None:
            if value not in roles:
                raise ValueError(f"id {at} is {value}, where a turn should begin with sys, usr or asst")
            messages.append({"role": roles[value], "content": ""})
            content = []
        elif value in roles:
            raise ValueError(f"id {at} begins a turn ({roles[value]}) before the one before has ended with EOT")
        elif value == special["eot"]:
            messages[-1]["content"] = tokenizer.decode(content)
            content = None
        else:
            content.append(value)
    if content is not None:
        if messages[-1]["role"] == "assistant" and not content:
            messages.pop()
        else:
            messages[-1]["content"] = tokenizer.decode(content)
    return messages


def reply_ids(ids: Sequence[int], tokenizer: TokenizerLike) -> list[int]:
    """The ids of the last assistant turn, without its sentinel and its EOT. Raises ValueError if there is none."""
    special = tokenizer.special_token_ids()
    values = [int(i) for i in ids]
    if special["asst"] not in values:
        raise ValueError("no assistant turn among these ids")
    start = len(values) - values[::-1].index(special["asst"])
    reply = values[start:]
    return reply[: reply.index(special["eot"])] if special["eot"] in reply else reply


def extract_reply(ids: Sequence[int], tokenizer: TokenizerLike) -> str:
    """The text of the last assistant turn. Raises ValueError if there is none."""
    return tokenizer.decode(reply_ids(ids, tokenizer))


def fit_chat(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike, limit: int) -> list[int]:
    """The prompt of as many of the latest messages as fit `limit` ids; a leading system message always stays.

    The last message stays too, whatever its length (the model then reads the end of it).
    """
    parts = _encode_each(messages, tokenizer)
    first = 1 if messages and messages[0].get("role") == "system" else 0
    total = sum(map(len, parts)) + 1
    drop = first
    while total > limit and drop < len(parts) - 1:
        total -= len(parts[drop])
        drop += 1
    kept = parts[:first] + parts[drop:]
    return [*(i for part in kept for i in part), tokenizer.special_token_ids()["asst"]]
