"""Messages from outside as the ids of a prompt: role tags and special strings in them are text, and forge no turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from niels_gpt.chat.format import ChatPrompt
from niels_gpt.chat.formats import chat_format
from niels_gpt.tokenizer import AnyTokenizer


def encode_untrusted(
    messages: Sequence[Mapping[str, str]], tokenizer: AnyTokenizer, limit: int, *, continue_last: bool = False
) -> ChatPrompt:
    """Return the prompt of the latest messages that fit into `limit` ids; see `ChatFormat.fit`.

    When they do not fit, older turns are dropped until half of the limit is free (`first_kept`), so that the next
    prompts of a growing conversation begin alike.
    """
    template = chat_format(tokenizer)
    start = 0 if continue_last else len(template.start)
    return template.fit(messages, limit, (limit - start) // 2 + start, continue_last=continue_last)
