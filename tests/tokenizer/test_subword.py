"""The SentencePiece tokenizer: lossless round trips, special tokens, batches, decoding, and invalid models."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niels_gpt.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer
from tests.faults import flipped

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
UNUSUAL = st.lists(
    st.sampled_from([*SPACES, *BLOCKS, *MARKS, *COMBINING, *SYMBOLS, *WORDS, *LITERALS, *SPECIAL_TOKENS]), max_size=10
).map("".join)


def naive_cut(text):
    """Split the text into special strings and single characters."""
    cut, i = [], 0
    while i < len(text):
        token = next((token for token in SPECIAL_TOKENS if text.startswith(token, i)), text[i])
        cut.append(token)
        i += len(token)
    return cut


@pytest.fixture(scope="session")
def reference(model_path):
    """SentencePiece with the same model."""
    return sentencepiece.SentencePieceProcessor(model_file=model_path)


@pytest.fixture(scope="session")
def naive_bytes(reference):
    """The bytes of each id, from the pieces of SentencePiece."""
    table = []
    for i in range(reference.vocab_size()):
        piece = reference.id_to_piece(i)
        if reference.is_byte(i):
            table.append(bytes.fromhex(piece.removeprefix("<0x").removesuffix(">")))
        else:
            table.append("".join(" " if character == "\u2581" else character for character in piece).encode())
    return table


# --- round trips -------------------------------------------------------------------------------------


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode("utf-8")
    specials = tokenizer.special_token_ids()
    found = [i for i in ids if i in specials.values()]
    assert found == [specials[NAMES[SPECIAL_TOKENS.index(t)]] for t in naive_cut(text) if t in SPECIAL_TOKENS]


@settings(max_examples=200)
@given(UNUSUAL | TEXTS)
def test_round_trip_of_any_text(tokenizer, text):
    check_round_trip(tokenizer, text)


def test_round_trip_of_examples(tokenizer):
    for text in (
        "",
        "   leading",
        "trailing   ",
        "in  the   middle",
        "a\r\nb\rc\n",
        "nul\0inside\0",
        *SPACES,
        *BLOCKS,
        *MARKS,
        *COMBINING,
        *SYMBOLS,
        *LITERALS,
        "".join(map(chr, range(0x250))),
    ):
        check_round_trip(tokenizer, text)


def test_the_training_text_is_compressed(tokenizer, corpus):
    characters = ids = 0
    for text in corpus:
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text
        characters, ids = characters + len(text), ids + len(found)
    assert ids < 0.6 * characters


@given(UNUSUAL)
def test_ids_equal_those_of_sentencepiece_without_blocks(tokenizer, reference, text):
    """SentencePiece reads a block as a space; otherwise the ids are the same."""
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


def test_the_special_ids(tokenizer, reference):
    specials = tokenizer.special_token_ids()
    assert list(specials) == NAMES
    assert len(set(specials.values())) == 4
    assert {name: reference.id_to_piece(i) for name, i in specials.items()} == dict(
        zip(NAMES, SPECIAL_TOKENS, strict=True)
    )
    specials["eot"] = -5
    assert tokenizer.special_token_ids()["eot"] >= 0  # a copy


def test_special_tokens_are_displayed_by_their_names(tokenizer):
    ids = tokenizer.encode(f"a{SYS}b{EOT}{USR}{ASST}é")
    assert tokenizer.render(iter(ids)) == "a<sys> b<eot>\n<usr> <asst> é"


@pytest.mark.parametrize(("name", "token"), list(zip(NAMES, SPECIAL_TOKENS, strict=True)))
def test_a_special_string_is_one_id_anywhere(tokenizer, name, token):
    special = tokenizer.special_token_ids()[name]
    for before, after in (("", ""), ("the bridge", "the bridge"), (" ", " "), ("漢\0", "\u2581"), ("<|", "|>")):
        wanted = [*tokenizer.encode(before), special, *tokenizer.encode(after)]
        assert tokenizer.encode(before + token + after) == wanted


@given(st.lists(UNUSUAL | TEXTS, max_size=6))
@example([])
@example([""])
@example(["", "a", ""])
@example(["a", "\u2581", "b"])
def test_a_batch_equals_single_encodings(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    assert len(batch) == len(texts)
    for text, ids in zip(texts, batch, strict=True):
        assert isinstance(ids, np.ndarray)
        assert ids.dtype == tokenizer.dtype == np.uint16
        assert ids.shape == (len(tokenizer.encode(text)),)
        assert ids.tolist() == tokenizer.encode(text)


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
    assert tokenizer.token_bytes[1:] == naive_bytes[1:]  # 0 is <unk>, which has no text
    single = [data for data in tokenizer.token_bytes if len(data) == 1]
    assert {bytes((byte,)) for byte in range(256)} <= set(single)
    assert not any("\u2581".encode() in data for data in tokenizer.token_bytes)


@pytest.mark.parametrize("character", ["\U0001d4b3", "\u2581", "ж"])
def test_an_unseen_character_is_its_bytes(tokenizer, character):
    ids = tokenizer.encode(character)
    data = character.encode()
    assert [tokenizer.token_bytes[i] for i in ids] == [data[i : i + 1] for i in range(len(data))]
    assert tokenizer.decode(ids) == character
    for cut in range(1, len(ids)):
        assert tokenizer.decode(ids[:cut]) == "\ufffd"
        assert tokenizer.decode([*tokenizer.encode("a"), *ids[:cut], *tokenizer.encode("b")]) == "a\ufffdb"
        assert tokenizer.decode(ids[cut:]) == "\ufffd" * (len(ids) - cut)


@pytest.mark.parametrize("wrap", [list, tuple, np.array, torch.tensor])
def test_ids_outside_the_vocabulary_are_an_error(tokenizer, wrap):
    good = tokenizer.encode("a")[0]
    for bad in (-1, tokenizer.vocab_size, 65_535, 2**40):
        for ids in ([bad], [good, bad], [bad, good]):
            with pytest.raises(ValueError, match=rf"\b0\.\.{tokenizer.vocab_size - 1}\b.*{bad}"):
                tokenizer.decode(wrap(ids))
    assert tokenizer.decode([]) == ""
    tokenizer.decode([0, tokenizer.vocab_size - 1])


@pytest.mark.parametrize("text", ["abc\udfff def", "abc\ud83d\ude00", "\u2581ab\ud800"])
def test_a_lone_surrogate_is_an_error_with_its_position(tokenizer, text):
    with pytest.raises(ValueError, match=r"character 3\b"):
        tokenizer.encode(text)
    for batch in ([text], ["fine", text], [text, "fine"], ["\u2581", text]):
        with pytest.raises(ValueError, match=r"character 3\b"):
            tokenizer.encode_batch(batch)
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"  # still works


@pytest.mark.parametrize("text", [None, 3, b"abc"])
def test_other_types_are_an_error(tokenizer, text):
    with pytest.raises((ValueError, TypeError)):
        tokenizer.encode(text)
    with pytest.raises((ValueError, TypeError)):
        tokenizer.encode_batch(["a", text])


# --- loading -----------------------------------------------------------------------------------------


def test_load_from_a_file_or_a_folder(model_path):
    data = Path(model_path).read_bytes()
    for path in (str(model_path), Path(model_path), Path(model_path).parent):
        loaded = load_tokenizer(path)
        assert isinstance(loaded, Tokenizer)
        assert (loaded.model, loaded.sha256) == (data, hashlib.sha256(data).hexdigest())


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "none.model", tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"a note, not a model\n" * 40, b"PK\x03\x04" + bytes(range(256))],
    ids=["empty", "zeros", "text", "zip"],
)
def test_a_file_that_is_not_a_model_is_named(tmp_path, data):
    path = tmp_path / "spm.model"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "niels-gpt tokenizer train" in str(caught.value)


def is_accepted(data):
    try:
        Tokenizer(data)
    except ValueError:
        return False
    return True


def test_a_truncated_model_is_an_error(tokenizer):
    """Also if it is cut between two fields, where the rest is a valid message of another tokenizer."""
    model = tokenizer.model
    assert is_accepted(model)
    assert [cut for cut in range(1, len(model), 7) if is_accepted(model[:cut])] == []


def train_directly(**options):
    """Train a model with SentencePiece directly; return its bytes."""
    out = io.BytesIO()
    defaults = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the river sleeps under the bridge", "boats carry bread to town"] * 20),
        model_writer=out,
        **(defaults | options),
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("symbols", "missing"),
    [(SPECIAL_TOKENS[:3], "eot"), (["<|endoftext|>"], "sys")],
)
def test_a_model_without_our_special_tokens_is_named(tmp_path, symbols, missing):
    path = tmp_path / "other.model"
    path.write_bytes(train_directly(byte_fallback=True, user_defined_symbols=list(symbols)))
    sentencepiece.SentencePieceProcessor(model_file=str(path))  # SentencePiece accepts it
    with pytest.raises(ValueError, match=rf"\b{missing}\b") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


LOSSLESS = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "user_defined_symbols": list(SPECIAL_TOKENS),
}


def test_a_lossless_model_is_accepted():
    other = Tokenizer(train_directly(**LOSSLESS))
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
def test_a_model_that_loses_text_is_an_error(change):
    """It has our special tokens, but a round trip changes text, or a special string is not one id."""
    with pytest.raises(ValueError, match="byte fallback"):
        Tokenizer(train_directly(**(LOSSLESS | change)))


def test_decode_of_one_id_and_of_several_rows(tokenizer):
    ids = tokenizer.encode("the")
    assert tokenizer.decode(torch.tensor(ids[0])) == tokenizer.decode(ids[:1])
    with pytest.raises(ValueError, match=r"shape \(2, 1\)"):
        tokenizer.decode(torch.tensor([ids[:1], ids[:1]]))


# --- damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["spm.model", "meta.json"])
def test_no_flipped_bit_is_loaded_in_silence(model_path, tokenizer, tmp_path, name):
    folder = shutil.copytree(Path(model_path).parent, tmp_path / "copy")
    for damaged in flipped((folder / name).read_bytes()):
        (folder / name).write_bytes(damaged)
        try:
            assert load_tokenizer(folder).sha256 == tokenizer.sha256
        except ValueError as err:
            assert name in str(err) and "tokenizer train" in str(err)
        else:
            assert name == "meta.json"  # in the key of its checksum


def test_a_model_that_differs_from_its_meta(model_path, tmp_path):
    folder = shutil.copytree(Path(model_path).parent, tmp_path / "copy")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta.pop("checksum")  # of an older version
    meta["sha256"] = "0" * 64
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match=r"spm\.model is damaged: its sha256 differs from .*meta\.json"):
        load_tokenizer(folder)
    (folder / "meta.json").unlink()
    assert load_tokenizer(folder).sha256 == load_tokenizer(model_path).sha256
    (folder / "meta.json").write_text("no JSON", encoding="utf-8")
    (folder / "spm.model").rename(folder / "tokenizer.model")  # another file's meta.json
    assert load_tokenizer(folder / "tokenizer.model").sha256 == load_tokenizer(model_path).sha256
