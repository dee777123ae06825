"""The pieces of our SentencePiece tokenizers, as other tokenizer formats need them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from niels_gpt.tokenizer import Tokenizer
from niels_gpt.tokenizer.piece_text import BLOCK


class Piece(NamedTuple):
    """One id of a tokenizer."""

    text: str
    """Spaces are spaces, not U+2581: so a U+2581 of a text matches no piece, and becomes its three bytes."""
    score: float
    """Log probability; 0 unless the kind is normal."""
    kind: Literal["normal", "byte", "special", "unknown"]


def pieces_of(tokenizer: Tokenizer) -> list[Piece]:
    """Return the pieces of a tokenizer in the order of their ids.

    Raises ValueError for one that an exported tokenizer could not encode as we do: a multi-character piece with a
    character that is no piece itself. SentencePiece trains no such model.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    special = set(tokenizer.special_token_ids().values())
    found = []
    for i in range(tokenizer.vocab_size):
        text: str = processor.id_to_piece(i)
        if i in special:
            found.append(Piece(text, 0.0, "special"))
        elif processor.is_byte(i) or processor.is_unknown(i):
            found.append(Piece(text, 0.0, "byte" if processor.is_byte(i) else "unknown"))
        else:
            found.append(Piece(text.replace(BLOCK, " "), processor.get_score(i), "normal"))
    texts = {piece.text for piece in found if piece.kind == "normal"}
    lonely = sorted({character for text in texts for character in text} - texts)
    if lonely:
        raise ValueError(f"the tokenizer has pieces with {lonely[0]!r}, but no piece for this character alone")
    return found


HARD_TEXTS = (
    "",
    " ",
    "  two  spaces  ",
    "\n\n\ttabs\t\r\nand line ends\r",
    "Hello, world! It's 12:34 o'clock, isn't it?",
    "naïve café, ÄÖÜß, Łódź, Ελληνικά, Русский, עברית, العربية",
    "漢字かな交じり文、한국어",
    "🙂👩‍👩‍👧‍👦🇩🇪 e\u0301 vs é, ﬁ①½",
    "\u2581 \u2581\u2581a\u2581",
    "\x00\x01\x1f\x7f\x80\u200b\u00a0\u3000\U0010ffff",
    "<unk> <s> </s> <0x41><0xE2> <0x> <|endoftext|>",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # why?\n",
    "https://example.org/a?b=c&d=%20#e",
    "0123456789 3.14159 1,000,000",
    "$$\\int_0^1 x^2 dx = \\frac{1}{3}$$ | a | b |\n|---|---|\n",
)
"""Texts with which an exported tokenizer is compared with ours."""
