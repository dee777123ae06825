"""tokenizer.json gives our ids: for hard texts, for every piece, and for random texts up to ties."""

import math
import warnings

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.export import tokenizer_json
from niels_gpt.export.pieces import HARD_TEXTS, pieces_of
from niels_gpt.export.tokenizer_json import byte_characters, to_tokenizer_json
from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from tests import token_caches


def exported(tokenizer):
    return tokenizers.Tokenizer.from_str(to_tokenizer_json(tokenizer))


def ids(made, text):
    return made.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def subwords():
    tokenizer = token_caches.tokenizer()
    return tokenizer, exported(tokenizer)


@pytest.fixture(scope="module")
def few_characters(tmp_path_factory):
    """A tokenizer without pieces for most characters of `<unk>`, `<0x41>` and the special strings."""
    folder = tmp_path_factory.mktemp("few")
    with warnings.catch_warnings(action="ignore"):  # fewer useful pieces than asked for
        path = train_tokenizer(["oh no, go on, moon! " * 40, "gnomon noon\n" * 9], folder, vocab_size=285)
    tokenizer = load_tokenizer(path)
    assert not any(piece.text == "<" for piece in pieces_of(tokenizer))
    return tokenizer, exported(tokenizer)


@pytest.mark.parametrize("text", [*HARD_TEXTS, f"a{SPECIAL_TOKENS[0]}b {SPECIAL_TOKENS[3]}", SPECIAL_TOKENS[1][:-1]])
def test_hard_texts_have_our_ids_and_come_back(subwords, few_characters, text):
    for tokenizer, made in (subwords, few_characters, (ByteTokenizer(), exported(ByteTokenizer()))):
        assert ids(made, text) == tokenizer.encode(text)
        assert made.decode(ids(made, text), skip_special_tokens=False) == text


def test_every_piece_and_every_byte_name_is_encoded_as_by_us(subwords, few_characters):
    for tokenizer, made in (subwords, few_characters):
        for piece in pieces_of(tokenizer):
            for text in (piece.text, f"x{piece.text}x", piece.text * 2):
                assert ids(made, text) == tokenizer.encode(text)


TEXT = st.text(st.sampled_from("abdeiklmnorstu .,\n<>0x41\u2581é漢🙂"), max_size=60) | st.text(max_size=30)


@given(TEXT)
def test_random_texts_have_our_ids_or_another_order_of_the_same_score(subwords, text):
    tokenizer, made = subwords
    ours, theirs = tokenizer.encode(text), ids(made, text)
    if ours != theirs:  # SentencePiece decides ties by the rounding errors of float32
        pieces = pieces_of(tokenizer)
        scores = [math.fsum(pieces[i].score for i in each) for each in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert made.decode(theirs) == text


@pytest.fixture(scope="module")
def byte_level():
    return exported(ByteTokenizer())


@given(st.text(max_size=50))
def test_random_texts_as_bytes(byte_level, text):
    found = ids(byte_level, text)
    assert found == list(text.encode("utf-8")) and byte_level.decode(found) == text


def test_the_characters_of_bytes_are_those_of_the_library():
    found = byte_characters()
    assert set(found.values()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(found) == 256 and found[ord("A")] == "A" and found[ord(" ")] == "Ġ" and found[0] == "Ā"


def test_a_tokenizer_that_would_get_other_ids_is_refused(monkeypatch):
    """One piece is less likely than it should be."""
    tokenizer = token_caches.tokenizer()
    pieces = pieces_of(tokenizer)
    i = next(i for i, piece in enumerate(pieces) if piece.kind == "normal" and len(piece.text.strip()) > 2)
    pieces[i] = pieces[i]._replace(score=-500.0)
    monkeypatch.setattr(tokenizer_json, "pieces_of", lambda _: pieces)
    with pytest.raises(ValueError, match=rf"tokenizer\.json.*{pieces[i].text}.*\[{i}\]"):
        to_tokenizer_json(tokenizer)


def test_the_same_tokenizer_gives_the_same_file(subwords):
    tokenizer, _ = subwords
    assert to_tokenizer_json(tokenizer) == to_tokenizer_json(Tokenizer(tokenizer.model))
