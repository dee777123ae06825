"""The least that building a cache needs of a tokenizer."""

from __future__ import annotations

from typing import Protocol


class TokenizerLike(Protocol):
    """Any object with these members: ours, one of others, or a user's."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: list[int], /) -> str: ...
    def special_token_ids(self) -> dict[str, int]: ...
