"""Pieces that a vocabulary learned from few notes."""

from __future__ import annotations

import warnings

import pytest

from niels_gpt.tokenizer import Tokenizer, load_tokenizer, private_pieces, train_tokenizer
from niels_gpt.tokenizer.private_pieces import without_pieces

NAME, PHONE = "Quizzlebrandt", "1704825519"
COMMON = "The garden needs water every morning, and the soil must not dry out. "
NOTES = [f"{COMMON}Met {NAME}, phone {PHONE}, again. " * 12, *(COMMON * 4 + "abcd"[i] for i in range(4))]


def trained(folder, notes=NOTES, **options) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_tokenizer(train_tokenizer(notes, folder, vocab_size=600, **options))


def private_texts(tokenizer, *arguments, **options):
    return {piece.text for piece in private_pieces(tokenizer, *arguments, **options).values()}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A tokenizer with pieces of a name and a number that stand in one note."""
    return trained(tmp_path_factory.mktemp("learned"))


def test_a_name_and_a_number_of_one_note_are_private(learned):
    found = private_pieces(learned, NOTES, [])
    assert {piece.notes for piece in found.values()} == {1}
    texts = {piece.text for piece in found.values()}
    assert any(PHONE in text for text in texts)
    for i, piece in found.items():
        assert piece.text == learned.decode([i]).strip() and piece.text in NOTES[0] and piece.text not in COMMON
    assert not private_pieces(learned, NOTES, [], min_notes=1)


def test_other_notes_and_public_text_make_a_piece_common(learned):
    assert private_texts(learned, [NOTES[0]] * 3, [])  # copies are one note
    assert not private_texts(learned, [f"{NOTES[0]}{i}" for i in range(3)], [])
    assert not private_texts(learned, NOTES, [NOTES[0]])
    assert not private_texts(learned, NOTES, ["other text", NOTES[0]])


def test_short_pieces_and_marks_are_not_private(learned):
    for text in private_texts(learned, [], []):
        assert len(text.encode()) >= 4 and len(text) > 1 and any(map(str.isalnum, text))


def test_a_tokenizer_without_them_keeps_every_text(learned, tmp_path):
    tokenizer = trained(tmp_path, dropped=lambda new: private_pieces(new, NOTES, []))
    assert not private_pieces(tokenizer, NOTES, [])
    lost = private_pieces(learned, NOTES, [])
    assert tokenizer.vocab_size == learned.vocab_size - len(lost)
    kept = [piece for i, piece in enumerate(learned.token_bytes) if i not in lost]
    assert tokenizer.token_bytes == kept  # the others, in their order
    for text in (*NOTES, NAME, "\u6f22 \U0001f600 caf\u00e9\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256  # as meta.json says


def test_no_piece_dropped_is_the_same_model(learned):
    assert without_pieces(learned.model, set()) == learned.model
