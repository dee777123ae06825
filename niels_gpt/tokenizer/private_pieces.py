"""Pieces that a vocabulary learned from few notes: names and numbers, which everyone reads who gets the tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from niels_gpt.tokenizer.subword import Tokenizer

MIN_NOTES = 3
"""A piece that stands in so many notes is no private word."""
MIN_BYTES = 4
"""Shorter pieces, and single characters, are parts of many words."""


class PrivatePiece(NamedTuple):
    """A piece of a vocabulary that stands in few notes and in no public text."""

    text: str
    notes: int
    """How many notes it stands in."""


def private_pieces(
    tokenizer: Tokenizer, notes: Iterable[str], public: Iterable[str], *, min_notes: int = MIN_NOTES
) -> dict[int, PrivatePiece]:
    """Return {id: piece} of the pieces that stand in fewer than `min_notes` different notes and in no public text.

    A piece stands in a text if it is a part of it, without the spaces around the piece.
    """
    special = set(tokenizer.special_token_ids().values())
    texts = {i: piece.decode("utf-8", "replace").strip() for i, piece in enumerate(tokenizer.token_bytes)}
    texts = {i: text for i, text in texts.items() if i not in special and _is_word(text)}
    counts = dict.fromkeys(texts.values(), 0)
    left: Collection[str] = list(counts)
    for note in dict.fromkeys(notes):  # a copy of a note is not another one
        for text in left:
            counts[text] += text in note
        left = [text for text in left if counts[text] < min_notes]
    for other in public if left else ():
        left = [text for text in left if text not in other]
    rest = set(left)
    return {i: PrivatePiece(text, counts[text]) for i, text in texts.items() if text in rest}


def _is_word(text: str) -> bool:
    return len(text) > 1 and len(text.encode("utf-8")) >= MIN_BYTES and any(map(str.isalnum, text))


def without_pieces(model: bytes, dropped: Collection[int]) -> bytes:
    """Return a SentencePiece model without some pieces; the ids of those after them are smaller then."""
    kept, at, number = bytearray(), 0, 0
    while at < len(model):  # a protobuf message whose fields all have a length; the pieces are field 1
        begin = at
        tag, at = _varint(model, at)
        size, at = _varint(model, at)
        at += size
        if tag >> 3 != 1 or number not in dropped:
            kept += model[begin:at]
        number += tag >> 3 == 1
    return bytes(kept)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (the number that begins at an offset, the offset after it)."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
