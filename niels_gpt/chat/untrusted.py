"""Messages from outside as the ids of a prompt: role tags and special strings in them are text, and forge no turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from niels_gpt.chat.template import ROLE_NAMES
from niels_gpt.chat.transcript import escape_content, first_kept, role_and_content
from niels_gpt.tokenizer import AnyTokenizer, Tokenizer


class ChatPrompt(NamedTuple):
    """The ids that a model continues, of which the first `pinned` are the system message."""

    ids: list[int]
    pinned: int


def encode_untrusted(
    messages: Sequence[Mapping[str, str]], tokenizer: AnyTokenizer, limit: int, *, continue_last: bool = False
) -> ChatPrompt:
    """Return the prompt of the latest messages that fit into `limit` ids, as `fit_chat` and `fit_messages` do.

    When they do not fit, older turns are dropped until half of the limit is free (`first_kept`), so that the next
    prompts of a growing conversation begin alike. The prompt ends with the start of an assistant's turn; with
    `continue_last` it ends inside the last message, which must be the assistant's.
    Raises ValueError for an unknown role, a content that is not a string or not encodable, and a last message that
    cannot be continued.
    """
    if continue_last and (not messages or messages[-1].get("role") != "assistant"):
        raise ValueError("only an assistant's message can be continued: let the last message have the role assistant")
    turns = [_encode_turn(message, number, tokenizer) for number, message in enumerate(messages)]
    if continue_last:
        turns[-1].pop()
        start: list[int] = []
    elif isinstance(tokenizer, Tokenizer):
        start = [tokenizer.special_token_ids()["asst"]]
    else:
        start = tokenizer.encode("assistant: ")
    system = 1 if messages and messages[0].get("role") == "system" else 0
    space = limit - len(start)
    first = first_kept([len(turn) for turn in turns], system, space, space // 2)
    ids = [*itertools.chain(*turns[:system], *turns[first:]), *start]
    return ChatPrompt(ids, sum(map(len, turns[:system])))


def _encode_turn(message: Mapping[str, str], number: int, tokenizer: AnyTokenizer) -> list[int]:
    role, content = role_and_content(message, number)
    try:
        if isinstance(tokenizer, Tokenizer):
            special = tokenizer.special_token_ids()
            return [special[ROLE_NAMES[role]], *tokenizer.encode_as_text(content), special["eot"]]
        return tokenizer.encode(f"{role}: {escape_content(content)}\n")
    except ValueError as err:
        raise ValueError(f"message {number} ({role}): {err}") from None
