"""A token that is added to the vocabulary of a subword model: a special one, or a string that is always one id."""

from __future__ import annotations

from typing import NamedTuple


class AddedToken(NamedTuple):
    """An added token of a tokenizer of others."""

    id: int
    content: str
    special: bool
    """Whether it marks a turn, the start or the end of a text: text from outside never encodes to it."""
