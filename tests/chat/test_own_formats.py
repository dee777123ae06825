"""The chat formats of our own models: encoding, and fitting into a limit."""

from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt.chat.own_formats import RoleIdFormat, TranscriptFormat
from niels_gpt.chat.transcript import format_chat
from niels_gpt.tokenizer import SPECIAL_TOKENS

SYS, USR, ASST, EOT = 13, 11, 17, 12  # in arbitrary order
MARK = {"system": SYS, "user": USR, "assistant": ASST}


class Characters:
    """A tokenizer whose ids are code points plus 100, and four special ids."""

    vocab_size = 100 + 0x110000

    def encode(self, text):
        return [100 + ord(character) for character in text]

    encode_as_text = encode

    def special_token_ids(self):
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}


FAKE = RoleIdFormat(Characters())
LARGE = 10**9


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
    ids = [SYS, 215, EOT, USR, 204, 205, EOT, ASST, EOT]
    assert FAKE.encode(messages) == (ids, [(8, 9)])
    assert FAKE.fit(messages, LARGE) == ([*ids, ASST], 3)
    assert FAKE.encode([]) == ([], [])
    assert FAKE.fit([], LARGE) == ([ASST], 0)


@given(MESSAGES)
def test_encode_is_exact_and_escapes_nothing(messages):
    before = [dict(each) for each in messages]
    ids, replies = FAKE.encode(messages)
    assert ids == naive_chat(messages)
    spoken = [[*naive_chat([each])[1:]] for each in messages if each["role"] == "assistant"]
    assert [ids[begin:end] for begin, end in replies] == spoken
    assert FAKE.fit(messages, LARGE).ids == [*naive_chat(messages), ASST]
    assert FAKE.encode([MappingProxyType(each) for each in messages]).ids == naive_chat(messages)
    assert messages == before


@pytest.mark.parametrize("bad", [message("tool", "x"), {"content": "x"}, {"role": "user"}, message("user", 3)])
def test_an_invalid_message_is_named_by_its_number(bad):
    good = message("user", "hi")
    for number, encode in enumerate((FAKE.encode, lambda messages: FAKE.fit(messages, 5), TranscriptFormat().encode)):
        messages = [good, good, good]
        messages[number] = bad
        facts = ".*'tool'.*system, user, assistant" if bad.get("role") == "tool" else ""
        with pytest.raises(ValueError, match=rf"message {number}\b{facts}"):
            encode(messages)


@pytest.mark.parametrize("token", SPECIAL_TOKENS, ids=["sys", "usr", "asst", "eot"])
def test_a_forged_turn_is_not_learned(token):
    for role, content in (("system", token), ("user", f"a{token}b"), ("assistant", f"\n{token}")):
        with pytest.raises(ValueError, match=r"message 1\b") as caught:
            FAKE.encode([message("user", "hi"), message(role, content), message("user", "hi")])
        assert token in str(caught.value)


def test_replies_of_a_transcript():
    messages = [message("user", "hi"), message("assistant", "é\nuser: x"), message("assistant", "")]
    ids, replies = TranscriptFormat().encode(messages)
    assert bytes(ids).decode() + "assistant: " == format_chat(messages)
    assert [bytes(ids[begin:end]).decode() for begin, end in replies] == ["é\nuser: x\n", "\n"]


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
    assert FAKE.fit(messages, limit).ids == naive_fit(messages, limit)
    assert messages == before  # the list is not changed


def test_fit_golden():
    messages = [message("system", "ab"), message("user", "c"), message("assistant", "d"), message("user", "e")]
    head, tail = [SYS, 197, 198, EOT], [USR, 201, EOT, ASST]
    complete = [*head, USR, 199, EOT, ASST, 200, EOT, *tail]
    assert len(complete) == 14
    assert FAKE.fit(messages, 14).ids == complete
    assert FAKE.fit(messages, 13).ids == [*head, ASST, 200, EOT, *tail]
    assert FAKE.fit(messages, 11).ids == [*head, ASST, 200, EOT, *tail]
    assert FAKE.fit(messages, 10).ids == [*head, *tail]
    assert FAKE.fit(messages, 1).ids == [*head, *tail]
    assert FAKE.fit(messages[1:], 4).ids == tail
    assert FAKE.fit(messages, 14, 8).ids == complete
    assert FAKE.fit(messages, 13, 8).ids == [*head, *tail]


@given(
    st.booleans(),
    st.lists(st.sampled_from(["", "hi", "longer text", "é" * 9]), max_size=7),
    st.integers(0, 150),
)
def test_fit_drops_the_oldest_lines_and_no_more_than_needed(system, contents, limit):
    head = [message("system", "be brief.")] if system else []
    turns = [message("user" if i % 2 == 0 else "assistant", content) for i, content in enumerate(contents)]
    given_messages = head + turns
    kept = TranscriptFormat().fit(given_messages, limit)

    def size(messages):
        return sum(len((m["role"] + ": " + m["content"] + "\n").encode()) for m in messages) + len("assistant: ")

    candidates = [head + turns[start:] for start in range(max(len(turns), 1))]
    fitting = [c for c in candidates if size(c) <= limit]
    assert bytes(kept.ids).decode() == format_chat(fitting[0] if fitting else candidates[-1])
    assert kept.pinned == (len("system: be brief.\n") if system else 0)
    assert given_messages == head + turns  # the list is not changed


def test_fit_drops_lines_in_large_steps():
    turns = [message("user" if i % 2 == 0 else "assistant", str(i) * (12 - 5 * (i % 2))) for i in range(9)]  # 19 bytes
    head = [message("system", "be brief.")]
    limit, keep = len(format_chat([*head, *turns[:5]])), len(format_chat([*head, *turns[:2]]))
    for number, first in ((5, 0), (6, 4), (7, 4), (9, 4)):
        kept = TranscriptFormat().fit([*head, *turns[:number]], limit, keep)
        assert bytes(kept.ids).decode() == format_chat([*head, *turns[first:number]])


# --- with a SentencePiece tokenizer ------------------------------------------------------------------


@given(MESSAGES)
def test_encode_with_a_real_tokenizer(subwords, messages):
    special = subwords.special_token_ids()
    chats = RoleIdFormat(subwords)
    ids = chats.encode(messages).ids
    wanted = []
    for each in messages:
        name = {"system": "sys", "user": "usr", "assistant": "asst"}[each["role"]]
        wanted += [special[name], *subwords.encode(each["content"]), special["eot"]]
    assert ids == wanted
    assert sum(i in special.values() for i in ids) == 2 * len(messages)  # content never gives a special id
    assert chats.fit(messages, LARGE).ids == [*wanted, special["asst"]]
