"""The pieces of our tokenizers."""

import pytest

from niels_gpt.export.pieces import HARD_TEXTS, pieces_of
from niels_gpt.tokenizer import SPECIAL_TOKENS
from tests import token_caches


def test_pieces_have_the_texts_that_ids_decode_to():
    tokenizer = token_caches.tokenizer()
    pieces = pieces_of(tokenizer)
    assert [piece.kind for piece in pieces[:6]] == ["unknown", *4 * ["special"], "byte"]
    assert [piece.text for piece in pieces if piece.kind == "special"] == list(SPECIAL_TOKENS)
    assert [piece.text for piece in pieces if piece.kind == "byte"] == [f"<0x{byte:02X}>" for byte in range(256)]
    normal = [i for i, piece in enumerate(pieces) if piece.kind == "normal"]
    assert len(normal) == tokenizer.vocab_size - 261
    assert all(pieces[i].text == tokenizer.decode([i]) and pieces[i].score < 0 for i in normal)
    assert " " in {pieces[i].text for i in normal} and not any("\u2581" in pieces[i].text for i in normal)


def test_hard_texts_are_hard():
    """They have characters without a piece, U+2581, names of byte pieces, controls, and runs of white space."""
    joined = "".join(HARD_TEXTS)
    assert all(part in joined for part in ("\u2581", "<0x41>", "<unk>", "\x00", "🙂", "  ", "\r\n"))


def test_a_character_without_a_piece_is_refused(monkeypatch):
    import sentencepiece

    real = sentencepiece.SentencePieceProcessor.id_to_piece

    def renamed(self, i):
        return "\u2581\u263a" if i == 300 else real(self, i)

    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "id_to_piece", renamed)
    with pytest.raises(ValueError, match="\u263a"):
        pieces_of(token_caches.tokenizer())
