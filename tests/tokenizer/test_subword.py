import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niels_gpt.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer

SYS, USR, ASST, EOT = SPECIAL_TOKENS
NAMES = ["sys", "usr", "asst", "eot"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))

SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\0", "\x0b", "\x85", "\xa0", "\u2028", "\u3000"]
BLOCKS = ["\u2581", "\u2581\u2581", " \u2581", "\u2581 ", "\u2580", "\u2582", "\u2585"]
MARKS = ["\ufffd", "\ufeff", "\ufffe", "\uffff", "\U0010ffff", "\ud7ff", "\ue000", "\u200b", "\u200d", "\u202e"]
COMBINING = ["e\u0301", "\u0301", "é", "A\u030a", "Å", "ﬁ", "①", "\uff46", "\u017f", "ẞ", "İ", "\u1100\u1161", "가"]
SYMBOLS = ["🍎", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "漢字", "日本語。", "€", "\U0001d4b3", "עברית", "ไทย"]
WORDS = ["a", "the ", "Note", "def f(x):", "    return", "über", "0", "x" * 70]
LITERALS = ["<0x41>", "<0xE2>", "<unk>", "<s>", "</s>", "<pad>", "<|ngpt_", SYS[:-1], SYS[1:], "\\u2581", "##a"]
NASTY = st.lists(
    st.sampled_from([*SPACES, *BLOCKS, *MARKS, *COMBINING, *SYMBOLS, *WORDS, *LITERALS, *SPECIAL_TOKENS]), max_size=10
).map("".join)


def naive_cut(text):
    """The text in pieces: special strings whole, all else character by character."""
    cut, i = [], 0
    while i < len(text):
        token = next((token for token in SPECIAL_TOKENS if text.startswith(token, i)), text[i])
        cut.append(token)
        i += len(token)
    return cut


@pytest.fixture(scope="session")
def reference(model_path):
    """SentencePiece itself, on the same file."""
    return sentencepiece.SentencePieceProcessor(model_file=model_path)


@pytest.fixture(scope="session")
def naive_bytes(reference):
    """For every id its bytes, read from the piece as SentencePiece spells it."""
    table = []
    for i in range(reference.vocab_size()):
        piece = reference.id_to_piece(i)
        if reference.is_byte(i):
            table.append(bytes.fromhex(piece.removeprefix("<0x").removesuffix(">")))
        else:
            table.append("".join(" " if character == "\u2581" else character for character in piece).encode())
    return table


# --- there and back ----------------------------------------------------------------------------------


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode("utf-8")
    specials = tokenizer.special_token_ids()
    found = [i for i in ids if i in specials.values()]
    assert found == [specials[NAMES[SPECIAL_TOKENS.index(t)]] for t in naive_cut(text) if t in SPECIAL_TOKENS]


@settings(max_examples=300)
@given(TEXTS)
@example("")
@example("\x00")
@example("\u2581")
@example(" ")
def test_any_text_comes_back(tokenizer, text):
    check_round_trip(tokenizer, text)


@settings(max_examples=400)
@given(NASTY)
def test_nasty_text_comes_back(tokenizer, text):
    check_round_trip(tokenizer, text)


@given(st.text(" \u2581a\n\t", max_size=12))
def test_spaces_and_blocks_are_kept_apart(tokenizer, text):
    check_round_trip(tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        " leading",
        "   leading",
        "trailing ",
        "trailing   ",
        "in  the   middle",
        "\ttab\t",
        "\n\n\nlines\n\n",
        "a\r\nb\rc\n",
        "\ufeffbom",
        "nul\0inside\0",
        *SPACES,
        *BLOCKS,
        *MARKS,
        *COMBINING,
        *SYMBOLS,
        *LITERALS,
        "".join(map(chr, range(0x250))),
    ],
)
def test_text_comes_back_golden(tokenizer, text):
    check_round_trip(tokenizer, text)


def test_the_training_text_comes_back_and_is_shorter(tokenizer, corpus):
    characters = ids = 0
    for text in corpus:
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text
        characters, ids = characters + len(text), ids + len(found)
    assert ids < 0.6 * characters  # it has learned something


def test_long_text_comes_back(tokenizer, corpus):
    text = ("\n\n".join(corpus) + "\u2581 漢\0" + EOT) * 5
    assert len(text) > 200_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(NASTY)
def test_sentencepiece_gives_the_same_ids_where_it_is_faithful(tokenizer, reference, text):
    """It takes a block for a space, and is right about all else."""
    text = text.replace("\u2581", "")
    assert tokenizer.encode(text) == reference.encode(text)


def test_a_block_is_its_three_bytes(tokenizer, reference):
    block = [reference.piece_to_id(f"<0x{byte}>") for byte in ("E2", "96", "81")]
    assert 0 not in block
    assert tokenizer.encode("\u2581") == block
    assert tokenizer.encode("a\u2581\u2581 b") == [
        *reference.encode("a"),
        *block,
        *block,
        *reference.encode(" b"),
    ]


def test_encoding_is_the_best_segmentation(tokenizer, reference, corpus):
    """Unigram: of all ways to cut a text, the one with the largest sum of log probabilities."""
    normal = {}
    for i in range(reference.vocab_size()):
        if not (reference.is_byte(i) or reference.is_unknown(i) or reference.id_to_piece(i) in SPECIAL_TOKENS):
            normal[reference.id_to_piece(i).replace("\u2581", " ")] = reference.get_score(i)
    longest = max(map(len, normal))
    for text in corpus[:20]:
        best = [0.0] + [-np.inf] * len(text)
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - longest), end):
                if text[start:end] in normal:
                    best[end] = max(best[end], best[start] + normal[text[start:end]])
        found = sum(reference.get_score(i) for i in tokenizer.encode(text))
        assert found == pytest.approx(best[-1], rel=1e-4)


# --- special tokens ----------------------------------------------------------------------------------


def test_the_special_ids(tokenizer, reference):
    specials = tokenizer.special_token_ids()
    assert list(specials) == NAMES
    assert len(set(specials.values())) == 4
    assert {name: reference.id_to_piece(i) for name, i in specials.items()} == dict(
        zip(NAMES, SPECIAL_TOKENS, strict=True)
    )
    specials["eot"] = -5
    assert tokenizer.special_token_ids()["eot"] >= 0  # the caller's own


@pytest.mark.parametrize(("name", "token"), list(zip(NAMES, SPECIAL_TOKENS, strict=True)))
@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("a", "b"), ("the bridge", "the bridge"), (" ", " "), ("\n", "\n"), ("漢\0", "\u2581"), ("<|", "|>")],
)
def test_a_special_string_is_one_id_anywhere(tokenizer, name, token, before, after):
    own = tokenizer.special_token_ids()[name]
    assert tokenizer.encode(before + token + after) == [*tokenizer.encode(before), own, *tokenizer.encode(after)]


def test_special_strings_in_a_row(tokenizer):
    specials = tokenizer.special_token_ids()
    order = ["asst", "asst", "eot", "sys", "usr", "eot"]
    text = "".join(SPECIAL_TOKENS[NAMES.index(name)] for name in order)
    ids = [specials[name] for name in order]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", [SYS[:-1], SYS[1:], SYS.upper(), USR[:9] + " " + USR[9:], EOT.replace("8", "\uff18")])
def test_half_a_special_string_is_text(tokenizer, text):
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_token_ids().values())


# --- batches -----------------------------------------------------------------------------------------


@given(st.lists(NASTY | TEXTS, max_size=6))
@example([])
@example([""])
@example(["", "a", ""])
@example(["a", "\u2581", "b"])
def test_a_batch_is_each_text_encoded(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    assert len(batch) == len(texts)
    for text, ids in zip(texts, batch, strict=True):
        assert isinstance(ids, np.ndarray)
        assert ids.dtype == np.uint16
        assert ids.shape == (len(tokenizer.encode(text)),)
        assert ids.tolist() == tokenizer.encode(text)


def test_a_large_batch(tokenizer, corpus):
    texts = tuple(corpus) * 3
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


# --- decoding ----------------------------------------------------------------------------------------


@given(st.data())
def test_any_ids_decode_to_the_text_of_their_bytes(tokenizer, naive_bytes, data):
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=30))
    wanted = b"".join(naive_bytes[i] for i in ids).decode("utf-8", errors="replace")
    assert tokenizer.decode(ids) == wanted
    for same in (tuple(ids), iter(ids), np.array(ids, dtype=np.uint16), np.array(ids, dtype=np.int64)):
        assert tokenizer.decode(same) == wanted
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == wanted


def test_the_bytes_of_every_id(tokenizer, naive_bytes):
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size == len(naive_bytes)
    assert tokenizer.token_bytes[1:] == naive_bytes[1:]  # 0 is <unk>, which stands for no text
    single = [data for data in tokenizer.token_bytes if len(data) == 1]
    assert {bytes((byte,)) for byte in range(256)} <= set(single)
    assert not any("\u2581".encode() in data for data in tokenizer.token_bytes)


@pytest.mark.parametrize("character", ["漢", "\U0001d4b3", "\u2581", "ж"])
def test_a_character_not_seen_is_its_bytes_and_half_of_it_shows_as_replacement(tokenizer, character):
    ids = tokenizer.encode(character)
    data = character.encode()
    assert [tokenizer.token_bytes[i] for i in ids] == [data[i : i + 1] for i in range(len(data))]
    assert tokenizer.decode(ids) == character
    for cut in range(1, len(ids)):
        assert tokenizer.decode(ids[:cut]) == "\ufffd"
        assert tokenizer.decode([*tokenizer.encode("a"), *ids[:cut], *tokenizer.encode("b")]) == "a\ufffdb"
        assert tokenizer.decode(ids[cut:]) == "\ufffd" * (len(ids) - cut)


@pytest.mark.parametrize("wrap", [list, tuple, np.array, torch.tensor])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, wrap):
    good = tokenizer.encode("a")[0]
    for bad in (-1, tokenizer.vocab_size, 65_535, 2**40):
        for ids in ([bad], [good, bad], [bad, good]):
            with pytest.raises(ValueError, match=str(bad)):
                tokenizer.decode(wrap(ids))
    assert tokenizer.decode([]) == ""
    tokenizer.decode([0, tokenizer.vocab_size - 1])


# --- what is no text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc\ud800", "abc\udfff def", "abc\ud83d\ude00", "abc\udc80\u2581", "\u2581ab\ud800"])
def test_a_lone_surrogate_is_refused_with_its_place(tokenizer, text):
    with pytest.raises(ValueError, match=r"character 3\b"):
        tokenizer.encode(text)
    for batch in ([text], ["fine", text], [text, "fine"], ["\u2581", text]):
        with pytest.raises(ValueError, match=r"character 3\b"):
            tokenizer.encode_batch(batch)
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"  # and goes on working


@pytest.mark.parametrize("text", [None, 3, b"abc"])
def test_what_is_no_string_is_refused(tokenizer, text):
    with pytest.raises((ValueError, TypeError)):
        tokenizer.encode(text)
    with pytest.raises((ValueError, TypeError)):
        tokenizer.encode_batch(["a", text])


# --- loading -----------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_file(tokenizer, model_path):
    data = Path(model_path).read_bytes()
    assert tokenizer.sha256 == hashlib.sha256(data).hexdigest()
    assert tokenizer.model == data


def test_loading_takes_the_file_or_its_folder(tokenizer, model_path):
    for path in (str(model_path), Path(model_path), Path(model_path).parent, str(Path(model_path).parent)):
        loaded = load_tokenizer(path)
        assert isinstance(loaded, Tokenizer)
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode("the bridge") == tokenizer.encode("the bridge")


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "none.model", tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"hello, this is a note and no model\n" * 40,
        b"\x80\x02}q\x00.",
        b"PK\x03\x04" + bytes(range(256)),
        b"\xff" * 5000,
    ],
    ids=["empty", "zeros", "text", "pickle", "zip", "ones"],
)
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path, data):
    path = tmp_path / "spm.model"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "restore it from a copy, or train one" in str(caught.value)


def is_accepted(data):
    try:
        Tokenizer(data)
    except ValueError:
        return False
    return True


def test_a_model_cut_anywhere_is_refused(tokenizer):
    """Also between two fields, where what is left is a valid message, but another tokenizer."""
    model = tokenizer.model
    assert is_accepted(model)
    assert [cut for cut in range(1, len(model)) if is_accepted(model[:cut])] == []


def train_elsewhere(**options):
    """The bytes of a model made with SentencePiece directly."""
    out = io.BytesIO()
    defaults = {
        "model_type": "unigram",
        "vocab_size": 300,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the river sleeps under the bridge", "boats carry bread to town"] * 20),
        model_writer=out,
        **(defaults | options),
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("symbols", "missing"),
    [([], "sys"), (SPECIAL_TOKENS[:3], "eot"), (SPECIAL_TOKENS[1:], "sys"), (["<|endoftext|>"], "sys")],
)
def test_a_model_without_our_special_tokens_is_refused_by_name(tmp_path, symbols, missing):
    path = tmp_path / "other.model"
    path.write_bytes(train_elsewhere(byte_fallback=True, user_defined_symbols=list(symbols)))
    sentencepiece.SentencePieceProcessor(model_file=str(path))  # a model it is
    with pytest.raises(ValueError, match=rf"\b{missing}\b") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


FAITHFUL = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "user_defined_symbols": list(SPECIAL_TOKENS),
}


def test_a_faithful_model_from_elsewhere_is_accepted():
    other = Tokenizer(train_elsewhere(**FAITHFUL))
    for text in (" the  river ", "\u2581漢", f"a{EOT}b", "ﬁ"):
        assert other.decode(other.encode(text)) == text


@pytest.mark.parametrize(
    "change",
    [
        {"byte_fallback": False},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"user_defined_symbols": [], "control_symbols": list(SPECIAL_TOKENS)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_loses_text_is_refused(change):
    """With our special tokens, but such that `decode(encode(s)) == s` does not hold, or a special is not one id."""
    data = train_elsewhere(**(FAITHFUL | change))
    try:
        other = Tokenizer(data)
    except ValueError:
        return
    for text in (" the  river ", "the river", "\u2581漢", "ﬁ①"):
        assert other.decode(other.encode(text)) == text
    assert [other.encode(token) for token in SPECIAL_TOKENS] == [[i] for i in other.special_token_ids().values()]
