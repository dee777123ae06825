"""The byte tokenizer: each utf-8 byte is one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def encode(text: str) -> torch.Tensor:
    """Return the utf-8 bytes of a text as ids in 0..255: int64, shape (n,).

    Raises ValueError for a string that cannot be encoded as utf-8 (it has a lone surrogate).
    """
    import torch

    return torch.from_numpy(np.frombuffer(utf8_bytes(text), dtype=np.uint8).astype(np.int64))


def utf8_bytes(text: str) -> bytes:
    """Return the utf-8 bytes of a text. Raises ValueError if it has a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ValueError(f"not encodable as utf-8: character {err.start} is a lone surrogate") from None


def check_text(text: str) -> None:
    """Raise ValueError for a value that is not a string, or cannot be encoded as utf-8."""
    if not isinstance(text, str):
        raise ValueError(f"a tokenizer encodes strings, got a {type(text).__name__}")
    utf8_bytes(text)


def decode(ids: torch.Tensor | Sequence[int]) -> str:
    """Return the text of byte ids, or of a single one; invalid utf-8 becomes U+FFFD.

    Raises ValueError for ids of several rows, and for an id outside 0..255.
    """
    values = flat_ids(ids)
    try:
        return bytes(values).decode("utf-8", errors="replace")
    except ValueError:
        raise ValueError(f"ids must be in 0..255, got {min(values)}..{max(values)}") from None


def flat_ids(ids: Any) -> list[int]:
    """Return ids as a list: of a sequence, a tensor or array of shape (n,), or a single id of shape ().

    Raises ValueError for more dimensions: each row is a separate text.
    """
    if hasattr(ids, "ndim"):
        if ids.ndim > 1:
            raise ValueError(
                f"ids must have one dimension, got shape {tuple(ids.shape)}: decode each row by itself (ids[0])"
            )
        ids = ids.reshape(-1).tolist()
    elif isinstance(ids, int):
        ids = [ids]
    return list(ids)


class ByteTokenizer:
    """The byte tokenizer with the interface of `Tokenizer`; it has no special tokens."""

    vocab_size = 256
    sha256 = None
    dtype = np.dtype(np.uint16)
    document_start: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    adds_space = False
    lossy = None
    loss_notice = None
    token_bytes: Sequence[bytes] = [bytes((byte,)) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        """Return the utf-8 bytes of a text. Raises ValueError as `encode` does."""
        return list(utf8_bytes(text))

    encode_as_text = encode
    """Bytes have no special strings."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of byte ids, as `decode` does."""
        return decode([int(i) for i in flat_ids(ids)])

    def special_token_ids(self) -> dict[str, int]:
        """Return {}: bytes have no special tokens."""
        return {}
