"""Choose the chat format of a tokenizer, and try it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from niels_gpt.chat.format import ChatFormat
from niels_gpt.chat.own_formats import RoleIdFormat, TranscriptFormat
from niels_gpt.tokenizer import AnyTokenizer, ForeignTokenizer, Tokenizer

if TYPE_CHECKING:
    from niels_gpt.chat.template_format import TemplateFormat


def chat_format(tokenizer: AnyTokenizer) -> ChatFormat:
    """Return the chat format that a tokenizer supplies."""
    if isinstance(tokenizer, ForeignTokenizer):
        return template_format(tokenizer)
    return RoleIdFormat(tokenizer) if isinstance(tokenizer, Tokenizer) else TranscriptFormat()


def template_format(tokenizer: ForeignTokenizer) -> TemplateFormat:
    """Return the chat format of a tokenizer of others, which is made once."""
    from niels_gpt.chat.template_format import TemplateFormat

    if tokenizer.chat_format is None:
        tokenizer.chat_format = TemplateFormat(tokenizer)
    found: TemplateFormat = tokenizer.chat_format
    return found


def why_it_cannot_chat(tokenizer: AnyTokenizer) -> str:
    """Return why the chat format of a tokenizer makes no prompt of a message; empty if it does."""
    try:
        fitted = chat_format(tokenizer).fit([{"role": "user", "content": "Hello."}], limit=1_000_000)
    except ValueError as err:
        return str(err)
    return "" if fitted.ids else "its chat template renders nothing"


def chat_problem(tokenizer: AnyTokenizer) -> str:
    """Return why a model with this tokenizer cannot chat, or cannot learn conversations; empty if it can do both."""
    if reason := why_it_cannot_chat(tokenizer):
        return f"it cannot chat: {reason}"
    try:
        assert chat_format(tokenizer).reply_start
    except ValueError as err:
        return f"it can chat, but not learn conversations: {err}"
    return ""
