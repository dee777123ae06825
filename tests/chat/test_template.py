"""The chat template: encoding, decoding, replies, and fitting into a limit."""

import itertools
import warnings
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt.chat.template import decode_chat, encode_chat, encode_prompt, extract_reply, fit_chat, reply_ids
from niels_gpt.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer

SYS, USR, ASST, EOT = 13, 11, 17, 12  # in arbitrary order
MARK = {"system": SYS, "user": USR, "assistant": ASST}


class Characters:
    """A tokenizer whose ids are code points plus 100, and four special ids."""

    vocab_size = 100 + 0x110000

    def encode(self, text):
        return [100 + ord(character) for character in text]

    def decode(self, ids):
        special = {SYS: "<sys>", USR: "<usr>", ASST: "<asst>", EOT: "<eot>"}
        return "".join(special[i] if i in special else chr(i - 100) for i in ids)

    def special_token_ids(self):
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}


FAKE = Characters()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short text has few pieces
        return load_tokenizer(train_tokenizer(["hello niels, how are you?"], tmp_path_factory.mktemp("real")))


def message(role, content):
    return {"role": role, "content": content}


def naive_chat(messages):
    ids = []
    for each in messages:
        ids.append(MARK[each["role"]])
        for character in each["content"]:
            ids.append(100 + ord(character))
        ids.append(EOT)
    return ids


ROLES = st.sampled_from(["system", "user", "assistant"])
ODD = ["", " ", "user: x", "a\nassistant: b", "<sys>", "\u2581", "\n two\n\nlines\n", SPECIAL_TOKENS[0][:-1]]
CONTENTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(ODD)
MESSAGES = st.lists(st.builds(message, ROLES, CONTENTS), max_size=6)
IDS = st.lists(st.sampled_from([SYS, USR, ASST, EOT, 197, 198]), max_size=8)


# --- encode ------------------------------------------------------------------------------------------


def test_encode_golden():
    messages = [message("system", "s"), message("user", "hi"), message("assistant", "")]
    assert encode_chat(messages, FAKE) == [SYS, 215, EOT, USR, 204, 205, EOT, ASST, EOT]
    assert encode_prompt(messages, FAKE) == [SYS, 215, EOT, USR, 204, 205, EOT, ASST, EOT, ASST]
    assert encode_chat([], FAKE) == []
    assert encode_prompt([], FAKE) == [ASST]


@given(MESSAGES)
def test_encode_is_exact_and_escapes_nothing(messages):
    before = [dict(each) for each in messages]
    assert encode_chat(messages, FAKE) == naive_chat(messages)
    assert encode_prompt(messages, FAKE) == [*naive_chat(messages), ASST]
    assert encode_chat([MappingProxyType(each) for each in messages], FAKE) == naive_chat(messages)
    assert messages == before


def fit_little(messages, tokenizer):
    return fit_chat(messages, tokenizer, 5)


ENCODERS = [encode_chat, encode_prompt, fit_little]


@pytest.mark.parametrize("bad", [message("tool", "x"), {"content": "x"}, {"role": "user"}, message("user", 3)])
def test_an_invalid_message_is_named_by_its_number(bad):
    good = message("user", "hi")
    for number, encode in enumerate(ENCODERS):
        messages = [good, good, good]
        messages[number] = bad
        facts = ".*'tool'.*system, user, assistant" if bad.get("role") == "tool" else ""
        with pytest.raises(ValueError, match=rf"message {number}\b{facts}"):
            encode(messages, FAKE)


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("token", SPECIAL_TOKENS, ids=["sys", "usr", "asst", "eot"])
def test_a_forged_turn_is_an_error(encode, token):
    for role, content in (("system", token), ("user", f"a{token}b"), ("assistant", f"\n{token}")):
        with pytest.raises(ValueError, match=r"message 1\b") as caught:
            encode([message("user", "hi"), message(role, content), message("user", "hi")], FAKE)
        assert token in str(caught.value)


# --- decode ------------------------------------------------------------------------------------------


@given(MESSAGES)
@example([])
@example([message("assistant", "")])
@example([message("user", ""), message("assistant", ""), message("assistant", "")])
def test_decode_is_the_inverse_of_encode(messages):
    assert decode_chat(naive_chat(messages), FAKE) == messages
    assert decode_chat([*naive_chat(messages), ASST], FAKE) == messages  # a prompt
    for wrap in (np.array, torch.tensor, tuple):
        assert decode_chat(wrap(naive_chat(messages)), FAKE) == messages


@given(MESSAGES, ROLES, CONTENTS.filter(bool))
def test_decode_accepts_an_unfinished_last_turn(messages, role, content):
    ids = [*naive_chat(messages), MARK[role], *FAKE.encode(content)]
    assert decode_chat(ids, FAKE) == [*messages, message(role, content)]


@pytest.mark.parametrize(
    ("ids", "position"),
    [
        ([197], 0),
        ([EOT], 0),
        ([USR, 197, EOT, 198, ASST, 199, EOT], 3),
        ([USR, 197, EOT, EOT], 3),
        ([SYS, EOT, USR, EOT, 197, ASST], 4),
    ],
)
def test_decode_of_other_ids_is_an_error(ids, position):
    with pytest.raises(ValueError, match=rf"\b{position}\b.*\b{ids[position]}\b"):
        decode_chat(ids, FAKE)


@given(IDS)
@example([USR, 197, ASST])
@example([ASST, ASST])
@example([USR, 197, SYS, EOT, ASST, 198, EOT])
@example([USR, 197, EOT, ASST, 198, USR, 197])
def test_decoded_messages_encode_to_the_same_ids(ids):
    """So no turn is dropped, and a role inside a turn is an error."""
    try:
        messages = decode_chat(ids, FAKE)
    except ValueError:
        return
    again = naive_chat(messages)
    assert ids in (again, [*again, ASST], again[:-1])  # closed, a prompt, or with a last turn still open


# --- the reply ---------------------------------------------------------------------------------------


@given(MESSAGES, CONTENTS)
def test_the_reply_to_a_prompt(messages, content):
    ids = [*naive_chat(messages), ASST, *FAKE.encode(content)]
    for closed in (ids, [*ids, EOT]) if content else ([*ids, EOT],):
        assert reply_ids(closed, FAKE) == FAKE.encode(content)
        assert extract_reply(closed, FAKE) == content
        assert extract_reply(torch.tensor(closed), FAKE) == content
        assert extract_reply(np.array(closed), FAKE) == content


@given(MESSAGES)
def test_the_reply_is_that_of_the_last_assistant(messages):
    replies = [each["content"] for each in messages if each["role"] == "assistant"]
    if replies:
        assert extract_reply(naive_chat(messages), FAKE) == replies[-1]
        assert reply_ids(naive_chat(messages), FAKE) == FAKE.encode(replies[-1])
    else:
        for function, ids in itertools.product((reply_ids, extract_reply), (naive_chat(messages), [EOT], [197])):
            with pytest.raises(ValueError, match="assistant"):
                function(ids, FAKE)


@pytest.mark.parametrize(
    ("ids", "reply"),
    [
        ([ASST, 197], [197]),
        ([ASST, EOT], []),
        ([ASST, 197, EOT, USR, 198, EOT], [197]),
        ([ASST, 197, EOT, USR, 198], [197]),
        ([ASST, 197, EOT, ASST, 198, 199, EOT], [198, 199]),
        ([USR, 197, EOT, ASST, 198, EOT, 199, 199], [198]),  # generation continued after the end
    ],
)
def test_reply_golden(ids, reply):
    assert reply_ids(ids, FAKE) == reply


def naive_fit(messages, limit):
    """Return the longest suffix of the turns that fits after the system message."""
    head = messages[:1] if messages and messages[0]["role"] == "system" else []
    turns = messages[len(head) :]
    for start in range(len(turns)):
        size = sum(len(each["content"]) + 2 for each in head + turns[start:]) + 1
        if size <= limit or start == len(turns) - 1:
            return [*naive_chat(head + turns[start:]), ASST]
    return [*naive_chat(head), ASST]


@given(
    st.booleans(),
    st.lists(st.builds(message, ROLES, st.sampled_from(["", "hi", "longer text", "é" * 9])), max_size=8),
    st.integers(-1, 90),
)
@example(True, [], 0)
@example(False, [], 0)
@example(True, [message("user", "longer text")], 0)
def test_fit_keeps_the_latest_that_fit(system, turns, limit):
    messages = ([message("system", "be brief.")] if system else []) + turns
    before = list(messages)
    assert fit_chat(messages, FAKE, limit) == naive_fit(messages, limit)
    assert messages == before  # the list is not changed


def test_fit_golden():
    messages = [message("system", "ab"), message("user", "c"), message("assistant", "d"), message("user", "e")]
    head, tail = [SYS, 197, 198, EOT], [USR, 201, EOT, ASST]
    complete = [*head, USR, 199, EOT, ASST, 200, EOT, *tail]
    assert len(complete) == 14
    assert fit_chat(messages, FAKE, 14) == complete
    assert fit_chat(messages, FAKE, 13) == [*head, ASST, 200, EOT, *tail]
    assert fit_chat(messages, FAKE, 11) == [*head, ASST, 200, EOT, *tail]
    assert fit_chat(messages, FAKE, 10) == [*head, *tail]
    assert fit_chat(messages, FAKE, 1) == [*head, *tail]
    assert fit_chat(messages[1:], FAKE, 4) == tail


# --- with a SentencePiece tokenizer ------------------------------------------------------------------


@given(MESSAGES)
def test_round_trip_with_a_real_tokenizer(real, messages):
    special = real.special_token_ids()
    ids = encode_chat(messages, real)
    wanted = []
    for each in messages:
        name = {"system": "sys", "user": "usr", "assistant": "asst"}[each["role"]]
        wanted += [special[name], *real.encode(each["content"]), special["eot"]]
    assert ids == wanted
    assert sum(i in special.values() for i in ids) == 2 * len(messages)  # content never gives a special id
    assert decode_chat(ids, real) == messages
    assert decode_chat(encode_prompt(messages, real), real) == messages


def test_a_reply_that_ends_inside_a_character(real):
    ids = [*encode_prompt([message("user", "hi")], real), *real.encode("you €")[:-1]]
    assert extract_reply(ids, real) == "you \ufffd"
