"""Encode batches of documents and conversations to tokens.

A build runs these functions in an executor (`system/executors.py`), by default in threads: SentencePiece releases the
interpreter lock while it encodes. There a tokenizer need not be picklable, and a builder accepts any object with the
four members of `TokenizerLike`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.formats import as_tokens
from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.own_formats import ROLE_NAMES
from niels_gpt.data.reading.drops import is_text
from niels_gpt.tokenizer import ForeignTokenizer
from niels_gpt.tokenizer.dtypes import token_dtype
from niels_gpt.tokenizer.interface import TokenizerLike
from niels_gpt.tokenizer.special import find_special

# Drop reasons. Stored in meta.json: another wording would change the bytes of caches.
SPECIAL = "with a special token in the text"
EMPTY = "that encode to nothing"
NOT_TEXT = "that are no utf-8 text"
NO_MESSAGES = "without messages"
BAD_ROLE = "with an unknown role"
NO_CONTENT = "with a message without content"
REFUSED = "that the chat template refuses"


class Encoded(NamedTuple):
    """The tokens of a batch of items."""

    tokens: np.ndarray
    """The concatenated tokens of all items."""
    lengths: np.ndarray
    """Tokens per item; 0 for a dropped item."""
    dropped: list[tuple[int, str]]
    """(item, reason) of the dropped items."""


def normalize_line_ends(text: str) -> str:
    """Replace `\\r\\n` with `\\n`: the only change a text undergoes on its way into a cache."""
    return text.replace("\r\n", "\n")


def encode_texts(texts: Sequence[Any], tokenizer: TokenizerLike) -> Encoded:
    """Encode every text, followed by one EOT. `\\r\\n` becomes `\\n`; nothing else is changed.

    With a tokenizer of others a text begins with its `document_start`, and special strings are text.
    """
    eot = tokenizer.special_token_ids()["eot"]
    good: list[tuple[int, str]] = []
    dropped: list[tuple[int, str]] = []
    for i, text in enumerate(texts):
        if not is_text(text):
            dropped.append((i, NOT_TEXT))
        elif not isinstance(tokenizer, ForeignTokenizer) and find_special(text) is not None:
            dropped.append((i, SPECIAL))
        else:
            good.append((i, normalize_line_ends(text)))
    lengths = np.zeros(len(texts), dtype=np.int64)
    parts: list[np.ndarray] = []
    end = as_tokens([eot], tokenizer.vocab_size)
    for (i, _), ids in zip(good, _encode_all([text for _, text in good], tokenizer), strict=True):
        if len(ids):
            parts += (ids, end)
            lengths[i] = len(ids) + 1
        else:
            dropped.append((i, EMPTY))
    return Encoded(_concatenate(parts, tokenizer.vocab_size), lengths, sorted(dropped))


def encode_chats(examples: Sequence[Any], tokenizer: TokenizerLike) -> Encoded:
    """Encode every conversation with the chat template: `[role] + content + [eot]` for each message.

    With a tokenizer of others its chat format decides. Raises ValueError if that cannot tell replies from the rest.
    """
    if isinstance(tokenizer, ForeignTokenizer):
        return _encode_formatted(examples, tokenizer)
    special = tokenizer.special_token_ids()
    vocab = tokenizer.vocab_size
    heads = {role: as_tokens([special[name]], vocab) for role, name in ROLE_NAMES.items()}
    end = as_tokens([special["eot"]], vocab)
    dropped = []
    good = []
    for i, messages in enumerate(examples):
        reason = _drop_reason(messages)
        if reason is None:
            good.append(i)
        else:
            dropped.append((i, reason))
    contents = iter(_encode_all([message["content"] for i in good for message in examples[i]], tokenizer))
    lengths = np.zeros(len(examples), dtype=np.int64)
    parts: list[np.ndarray] = []
    for i in good:
        for message in examples[i]:
            ids = next(contents)
            parts += (heads[message["role"]], ids, end)
            lengths[i] += len(ids) + 2
    return Encoded(_concatenate(parts, vocab), lengths, dropped)


def _encode_formatted(examples: Sequence[Any], tokenizer: ForeignTokenizer) -> Encoded:
    """Encode conversations with the chat format of a tokenizer of others."""
    chats, vocab = chat_format(tokenizer), tokenizer.vocab_size
    _ = chats.reply_start  # raises for a template that cannot be masked
    parts: list[np.ndarray] = []
    lengths = np.zeros(len(examples), dtype=np.int64)
    dropped = []
    for i, messages in enumerate(examples):
        reason = _drop_reason(messages, special=False)
        if reason is None:
            try:
                ids = chats.encode(messages).ids
            except ValueError:
                reason = REFUSED
            else:
                parts.append(np.array(ids, dtype=tokenizer.dtype))
                lengths[i] = len(ids)
        if reason is not None:
            dropped.append((i, reason))
    return Encoded(_concatenate(parts, vocab), lengths, dropped)


def _drop_reason(messages: Any, *, special: bool = True) -> str | None:
    """Why a conversation is dropped, or None. `special`: whether our special strings are a reason."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return NO_MESSAGES
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLE_NAMES:
            return BAD_ROLE
        content = message.get("content")
        if not content or not isinstance(content, str):
            return NO_CONTENT
        if not is_text(content):
            return NOT_TEXT
        if special and find_special(content) is not None:
            return SPECIAL
    return None


def _encode_all(texts: list[str], tokenizer: TokenizerLike) -> list[np.ndarray]:
    batch = getattr(tokenizer, "encode_documents", None) or getattr(tokenizer, "encode_batch", None)
    if batch is not None:
        arrays: list[np.ndarray] = batch(texts)
        dtype = token_dtype(tokenizer.vocab_size)
        for ids in arrays:
            if ids.dtype.itemsize < dtype.itemsize:  # ids may have been cut already
                raise ValueError(f"encode_batch of the tokenizer returns {ids.dtype}; its vocabulary needs {dtype}")
        return arrays
    return [as_tokens(tokenizer.encode(text), tokenizer.vocab_size) for text in texts]


def _concatenate(parts: list[np.ndarray], vocab_size: int) -> np.ndarray:
    """Concatenate tokens. Raises ValueError for an id that cannot be stored."""
    dtype = token_dtype(vocab_size)
    if not parts:
        return np.empty(0, dtype=dtype)
    tokens = np.concatenate(parts)
    if tokens.dtype == dtype and int(tokens.max()) < vocab_size:
        return tokens
    return as_tokens(tokens, vocab_size)
