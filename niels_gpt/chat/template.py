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
    refuse_special(content)


def encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """The ids of a whole conversation. Raises ValueError as `check_message` does."""
    special = tokenizer.special_token_ids()
    ids: list[int] = []
    for number, message in enumerate(messages):
        check_message(message, number)
        ids += [special[ROLE_NAMES[message["role"]]], *tokenizer.encode(message["content"]), special["eot"]]
    return ids


def encode_prompt(messages: Sequence[Mapping[str, str]], tokenizer: TokenizerLike) -> list[int]:
    """The ids that an assistant's next reply continues. Raises ValueError as `check_message` does."""
    return [*encode_chat(messages, tokenizer), tokenizer.special_token_ids()["asst"]]


def decode_chat(ids: Sequence[int], tokenizer: TokenizerLike) -> list[dict[str, str]]:
    """The messages of ids: what `encode_chat` encoded. A closing bare assistant id is a prompt, not a message.

    Raises ValueError for ids that do not begin with a role, and for anything between a turn's end and the next role.
    """
    special = tokenizer.special_token_ids()
    roles = {special[name]: role for role, name in ROLE_NAMES.items()}
    messages: list[dict[str, str]] = []
    values = [int(i) for i in ids]
    start = 0
    while start < len(values):
        if values[start] not in roles:
            raise ValueError(f"id {start} is {values[start]}, where a turn should begin with sys, usr or asst")
        end = values.index(special["eot"], start) if special["eot"] in values[start:] else len(values)
        messages.append({"role": roles[values[start]], "content": tokenizer.decode(values[start + 1 : end])})
        start = end + 1
    if values and roles.get(values[-1]) == "assistant":
        messages.pop()
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
    kept = list(messages)
    first = 1 if kept and kept[0].get("role") == "system" else 0
    ids = encode_prompt(kept, tokenizer)
    while len(ids) > limit and len(kept) > first + 1:
        del kept[first]
        ids = encode_prompt(kept, tokenizer)
    return ids
