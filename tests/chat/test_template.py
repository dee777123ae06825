"""The chat template: encoding, and fitting into a limit."""

import warnings
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt.chat.template import encode_chat, encode_prompt, fit_chat
from niels_gpt.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer

SYS, USR, ASST, EOT = 13, 11, 17, 12  # in arbitrary order
MARK = {"system": SYS, "user": USR, "assistant": ASST}


class Characters:
    """A tokenizer whose ids are code points plus 100, and four special ids."""

    vocab_size = 100 + 0x110000

    def encode(self, text):
        return [100 + ord(character) for character in text]

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


# --- fit --------------------------------------------------------------------------------------------


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
    assert fit_chat(messages, FAKE, 14, 8) == complete
    assert fit_chat(messages, FAKE, 13, 8) == [*head, *tail]


# --- with a SentencePiece tokenizer ------------------------------------------------------------------


@given(MESSAGES)
def test_encode_with_a_real_tokenizer(real, messages):
    special = real.special_token_ids()
    ids = encode_chat(messages, real)
    wanted = []
    for each in messages:
        name = {"system": "sys", "user": "usr", "assistant": "asst"}[each["role"]]
        wanted += [special[name], *real.encode(each["content"]), special["eot"]]
    assert ids == wanted
    assert sum(i in special.values() for i in ids) == 2 * len(messages)  # content never gives a special id
    assert encode_prompt(messages, real) == [*wanted, special["asst"]]
