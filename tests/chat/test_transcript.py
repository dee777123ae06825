"""The chat transcript against a line-based parser."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt.chat import extract_assistant_reply, format_chat
from niels_gpt.chat.transcript import DELIMITER, ROLES, STOPS, check_content, first_kept, parse_chat

TAGS = ("system: ", "user: ", "assistant: ")


def message(role, content):
    return {"role": role, "content": content}


def naive_turns(text):
    """Return (tag, content) per turn, line by line; text before the first tag belongs to no turn."""
    turns = []
    for line in text.split("\n"):
        for tag in TAGS:
            if line.startswith(tag):
                turns.append([tag, line[len(tag) :]])
                break
        else:
            if turns:
                turns[-1][1] += "\n" + line
    return turns


def naive_reply(text):
    replies = [content.strip() for tag, content in naive_turns(text) if tag == "assistant: "]
    if not replies:
        raise ValueError
    return next((reply for reply in reversed(replies) if reply), "")


# Fragments that form tags, parts of tags, and tags at wrong positions.
TAG_PARTS = [*TAGS, "assistant:", "Assistant: ", "USER: ", "user", "\nassistant: ", "\nuser: "]
SPACES = ["\n", "\n", "\n\n", " ", "\r\n", "\t", "\u2028", "\x0b", "\x85"]
WORDS = ["a", "b c", "é", "<dialogue>"]
TRANSCRIPTS = st.lists(st.sampled_from([*TAG_PARTS, *SPACES, *WORDS]), max_size=14).map("".join)


# --- format ------------------------------------------------------------------------------------------


def test_format_golden():
    messages = [
        message("system", "be brief."),
        message("user", "who is niels?"),
        message("assistant", "niels is here."),
    ]
    assert format_chat(messages) == ("system: be brief.\nuser: who is niels?\nassistant: niels is here.\nassistant: ")
    assert format_chat([]) == "assistant: "


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.text())))
def test_format_is_exact_and_escapes_nothing(turns):
    wanted = ""
    for role, content in turns:
        wanted = wanted + role + ": " + content + "\n"
    assert format_chat([message(*turn) for turn in turns]) == wanted + "assistant: "


@pytest.mark.parametrize("role", ["User", "tool", "", None, "user "])
def test_format_rejects_other_roles(role):
    with pytest.raises(ValueError, match=r"message 1 .*system, user, assistant"):
        format_chat([message("user", "hi"), message(role, "x")])


@pytest.mark.parametrize("bad", [{"role": "user"}, {"role": "user", "content": 3}, {"content": "x"}])
def test_format_rejects_other_types(bad):
    with pytest.raises(ValueError, match=r"message 0" + (r" \(user\)" if "role" in bad else "")):
        format_chat([bad])


# --- extract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("assistant: hello", "hello"),
        ("user: hi\nassistant: hello\nuser: more\n", "hello"),
        ("user: hi\nassistant: hello\nsystem: stop", "hello"),
        ("user: hi\nassistant: one\nuser: and?\nassistant: two\nuser: ", "two"),
        ("user: hi\nassistant: one\nassistant: ", "one"),  # a final bare tag is a prompt
        ("user: hi\nassistant: one\nuser: and?\nassistant:  \n\n", "one"),
        ("user: hi\nassistant: a\n\nb\n", "a\n\nb"),
        ("user: hi\nassistant: say user: x and assistant: y", "say user: x and assistant: y"),
        ("user: hi\nassistant: a\n user: b", "a\n user: b"),
        ("user: hi\nassistant: a\nUser: b\nuser:c\nassistant:d", "a\nUser: b\nuser:c\nassistant:d"),
        ("user: hi\nassistant: a\r\nuser: b", "a"),
        ("user: hi\nassistant: a\ruser: b", "a\ruser: b"),  # only "\n" begins a line
        ("user: hi\nassistant: a\u2028user: b", "a\u2028user: b"),
        ("before\nuser: say assistant: x\nassistant: y", "y"),
        ("assistant: \nassistant: \n", ""),
    ],
)
def test_extract_golden(text, reply):
    assert naive_reply(text) == reply  # the reference itself
    assert extract_assistant_reply(text) == reply


@pytest.mark.parametrize("text", ["", "user: hi\n", "Assistant: x", "assistant:x", " assistant: x", "xassistant: "])
def test_extract_without_a_tag_is_an_error(text):
    with pytest.raises(ValueError, match="assistant: "):
        extract_assistant_reply(text)


@given(TRANSCRIPTS)
@example("assistant: a\nassistant: \nuser: ")
def test_extract_matches_the_line_based_parser(text):
    try:
        wanted = naive_reply(text)
    except ValueError:
        with pytest.raises(ValueError):
            extract_assistant_reply(text)
    else:
        assert extract_assistant_reply(text) == wanted


# --- parse -------------------------------------------------------------------------------------------


def forges_a_turn(content):
    """Whether a line after the first begins a turn (the first line follows its own tag)."""
    return any(line.startswith(TAGS) for line in content.split("\n")[1:])


CONTENTS = TRANSCRIPTS | st.text() | st.sampled_from(["", "user: x", "a\n user: b", "a\nuser:b", "two\n\n\nlines"])


@given(st.lists(st.tuples(st.sampled_from(ROLES), CONTENTS.map(str.strip)), max_size=6))
@example([])
@example([("assistant", "")])
@example([("user", ""), ("assistant", ""), ("assistant", "")])
@example([("user", "a"), ("user", "b"), ("system", "assistant: c")])
def test_parse_is_the_inverse_of_format(turns):
    messages = [message(role, "x" if forges_a_turn(content) else content) for role, content in turns]
    assert parse_chat(format_chat(messages)) == messages


@given(TRANSCRIPTS)
def test_parse_matches_the_line_based_parser(text):
    turns = naive_turns(text)
    before = []
    for line in text.split("\n"):
        if line.startswith(TAGS):
            break
        before.append(line)
    if not turns or "\n".join(before).strip():
        with pytest.raises(ValueError):
            parse_chat(text)
        return
    wanted = [message(tag.removesuffix(": "), content.strip()) for tag, content in turns]
    if wanted[-1] == message("assistant", ""):
        del wanted[-1]  # a prompt
    assert parse_chat(text) == wanted


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("user: hi\nassistant: ", [("user", "hi")]),
        ("system: s\n\nuser:  hi \r\nassistant: a\n\nb\n", [("system", "s"), ("user", "hi"), ("assistant", "a\n\nb")]),
        ("\n \nuser: hi", [("user", "hi")]),
        ("assistant: ", []),
        ("assistant: \nassistant: ", [("assistant", "")]),
        ("user: \nassistant: x", [("user", ""), ("assistant", "x")]),
        ("user: ", [("user", "")]),  # only the assistant is prompted
        ("user: say assistant: x\n user: y\nuser:z", [("user", "say assistant: x\n user: y\nuser:z")]),
        ("user: a\nuser: b\nsystem: c", [("user", "a"), ("user", "b"), ("system", "c")]),
        ("user: a\u2028assistant: b\rassistant: c", [("user", "a\u2028assistant: b\rassistant: c")]),
    ],
)
def test_parse_golden(text, turns):
    assert parse_chat(text) == [message(*turn) for turn in turns]


@pytest.mark.parametrize(
    "text",
    ["", " \n", "hello", "hello\nuser: hi", " user: hi", "User: hi", "user:hi", "tool: x\nuser: hi", "xuser: hi"],
)
def test_parse_of_other_text_is_an_error(text):
    with pytest.raises(ValueError, match="turn") as caught:
        parse_chat(text)
    assert text.strip()[:10].partition("\n")[0] in str(caught.value)


def test_stops_are_the_turn_tags_and_the_delimiter():
    assert set(STOPS) == {"\nsystem: ", "\nuser: ", "\nassistant: ", "\n\n<dialogue>"}
    assert DELIMITER == "\n\n<dialogue>\n\n"


@given(TRANSCRIPTS)
def test_content_that_forges_a_turn_is_an_error(text):
    tags = [tag for tag, _ in naive_turns(text)]
    if tags or "<dialogue>" in text:
        with pytest.raises(ValueError) as caught:
            check_content(text)
        assert any(fact in str(caught.value) for fact in (*tags, "<dialogue>"))
    else:
        check_content(text)
        # Accepted text stays one turn.
        assert naive_turns(format_chat([message("user", text)])) == [["user: ", text], ["assistant: ", ""]]


@given(st.integers(0, 1), st.lists(st.integers(0, 40), max_size=20), st.integers(0, 100), st.integers(0, 100))
def test_turns_are_dropped_in_large_steps(system, sizes, limit, keep):
    """A drop leaves at most `keep`; until the next drop every message starts from the same turn."""
    system = min(system, len(sizes))
    firsts = [first_kept(sizes[:n], system, limit, keep) for n in range(len(sizes) + 1)]
    for n in range(system + 1, len(sizes) + 1):
        first, before = firsts[n], max(firsts[n - 1], system)
        kept = sum(sizes[:system]) + sum(sizes[first:n])
        if sum(sizes[:system]) + sum(sizes[before:n]) <= limit:
            assert first == before
        else:
            assert before <= first < n
            assert kept <= min(keep, limit) or first == n - 1
            assert first == before or kept + sizes[first - 1] > min(keep, limit)  # no more than needed
