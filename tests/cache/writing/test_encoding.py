import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.writing import encoding
from niels_gpt.cache.writing.encoding import encode_chats, encode_texts
from tests.cache import EOT, SPECIAL_STRINGS, ByteTokenizer, chat_ids, drop_reason, real_tokenizer

TEXTS = st.text(st.sampled_from("ab \r\n\té😀\u2581\ufeff\x00"), max_size=10)
ODD = st.sampled_from(["", None, 7, b"bytes", ["a"], "\ud800", "a\udfffb", *SPECIAL_STRINGS, f"x{SPECIAL_STRINGS[0]}y"])
DOCUMENTS = st.lists(TEXTS | ODD, max_size=12)


def sequences(encoded):
    """The tokens of each item."""
    assert encoded.tokens.dtype.str == "<u2"
    assert sum(encoded.lengths) == len(encoded.tokens)
    parts, at = [], 0
    for length in encoded.lengths.tolist():
        parts.append(encoded.tokens[at : at + length].tolist())
        at += length
    return parts


# --- documents ---------------------------------------------------------------------------------------


@given(DOCUMENTS, st.sampled_from([ByteTokenizer, real_tokenizer]))
def test_documents_are_tokens_and_one_eot(texts, make):
    tokenizer = make()
    eot = tokenizer.special_token_ids()["eot"]
    encoded = encode_texts(texts, tokenizer)
    reasons = [drop_reason(text) for text in texts]
    assert encoded.dropped == [(i, reason) for i, reason in enumerate(reasons) if reason]
    wanted = [
        [] if reason else [*tokenizer.encode(text.replace("\r\n", "\n")), eot]
        for text, reason in zip(texts, reasons, strict=True)
    ]
    assert sequences(encoded) == wanted


def test_only_line_ends_are_normalized():
    text = "\ufeff a\r\nb\rc\n\r\r\n\u2028 e\u0301\x00\u00a0 \t"
    tokens = sequences(encode_texts([text], ByteTokenizer()))[0]
    assert bytes(tokens[:-1]).decode() == "\ufeff a\nb\rc\n\r\n\u2028 e\u0301\x00\u00a0 \t"
    assert tokens[-1] == EOT


# --- conversations -----------------------------------------------------------------------------------


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS.filter(bool)}
)


@given(
    st.lists(st.lists(MESSAGES, min_size=1, max_size=4), max_size=6), st.sampled_from([ByteTokenizer, real_tokenizer])
)
def test_conversations_follow_the_chat_template(examples, make):
    tokenizer = make()
    encoded = encode_chats(examples, tokenizer)
    assert encoded.dropped == []
    assert sequences(encoded) == [chat_ids(example, tokenizer) for example in examples]


def test_chat_template_by_hand():
    example = [
        {"role": "system", "content": "s\r\n"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "é"},
    ]
    assert sequences(encode_chats([example], ByteTokenizer())) == [
        [256, 115, 13, 10, 259, 257, 97, 98, 259, 258, 0xC3, 0xA9, 259]
    ]


GOOD = {"role": "user", "content": "a"}
MALFORMED = [
    ([], encoding.NO_MESSAGES),
    (None, encoding.NO_MESSAGES),
    ("user: a", encoding.NO_MESSAGES),
    ({"role": "user", "content": "a"}, encoding.NO_MESSAGES),
    (["a"], encoding.BAD_ROLE),
    ([{"content": "a"}], encoding.BAD_ROLE),
    ([GOOD, {}, GOOD], encoding.BAD_ROLE),
    ([{"role": "tool", "content": "a"}], encoding.BAD_ROLE),
    ([{"role": ["user"], "content": "a"}], encoding.BAD_ROLE),
    ([{"role": "user"}], encoding.NO_CONTENT),
    ([{"role": "user", "content": ""}], encoding.NO_CONTENT),
    ([{"role": "user", "content": 7}], encoding.NO_CONTENT),
    ([GOOD, {"role": "user", "content": ["a"]}], encoding.NO_CONTENT),
    ([{"role": "user", "content": "\udc00"}], encoding.NOT_TEXT),
    ([{"role": "user", "content": f"a{SPECIAL_STRINGS[2]}"}], encoding.SPECIAL),
]


@pytest.mark.parametrize(("example", "reason"), MALFORMED, ids=[repr(example)[:40] for example, _ in MALFORMED])
def test_malformed_conversations_are_dropped_with_a_reason(example, reason):
    encoded = encode_chats([[GOOD], example, [GOOD, GOOD]], ByteTokenizer())
    assert encoded.dropped == [(1, reason)]
    assert sequences(encoded) == [[257, 97, 259], [], [257, 97, 259, 257, 97, 259]]


# --- tokenizers --------------------------------------------------------------------------------------


class Wrong(ByteTokenizer):
    """Returns an id that cannot be stored for texts with a z."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def encode(self, text):
        return [97, self.bad] if "z" in text else super().encode(text)


class WrongInBatches(Wrong):
    def encode_batch(self, texts):
        return [np.array(self.encode(text)) for text in texts]


class WrongInStoredBatches(Wrong):
    def encode_batch(self, texts):
        return [np.array(self.encode(text), dtype="<u2") for text in texts]


@pytest.mark.parametrize(
    ("make", "bad"), [*itertools.product([Wrong, WrongInBatches], [-1, 260, 65_536 + 97]), (WrongInStoredBatches, 260)]
)
def test_ids_that_cannot_be_stored_raise(make, bad):
    for encode, items in ((encode_texts, ["a", "z"]), (encode_chats, [[GOOD], [{"role": "user", "content": "z"}]])):
        assert encode(items[:1], make(bad)).dropped == []
        with pytest.raises(ValueError, match=str(bad)):
            encode(items, make(bad))
