"""Primer: dialogues, their split, and their messages."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.chat import format_chat
from niels_gpt.data.embedded import PRIMER
from niels_gpt.data.primer import (
    chat_file_text,
    iter_primer_sft,
    load_primer_text,
    primer_dialogues,
    primer_layout,
    split_primer_dialogues,
)
from niels_gpt.data.types import ChatMessage, ChatSample
from tests.cache import split_rule
from tests.data import dropped_lines, write_rows

DELIMITER = "\n\n<dialogue>\n\n"


def naive_blocks(text, delimiter=DELIMITER):
    """The blocks between delimiters, found one by one from the left; blank ones dropped."""
    blocks, rest = [], text
    while (end := rest.find(delimiter)) >= 0:
        blocks.append(rest[:end])
        rest = rest[end + len(delimiter) :]
    return [block for block in [*blocks, rest] if block.strip() != ""]


def naive_split(text, val_frac, seed, delimiter=DELIMITER):
    return tuple(
        delimiter.join(blocks) for blocks in split_rule(naive_blocks(text, delimiter), val_frac, seed).values()
    )


TEXTS = st.lists(
    st.sampled_from(
        [DELIMITER, DELIMITER, "<dialogue>", "\n\n", "\n", " ", "user: a\nassistant: b", "x", "é", "\r\n", "\t"]
    ),
    max_size=20,
).map("".join)


@pytest.mark.parametrize(
    "data", [b"", b"user: a\r\nassistant: b\r", b"\xef\xbb\xbfuser: \xc3\xa9\n\n", b" \n<dialogue>\n "]
)
def test_text_is_read_as_stored(tmp_path, data):
    path = tmp_path / "primer.txt"
    path.write_bytes(data)
    assert load_primer_text(str(path)).encode("utf-8") == data


def test_a_file_that_is_not_utf8_is_named_with_the_byte_offset(tmp_path):
    path = tmp_path / "primer.txt"
    path.write_bytes("é".encode() * 3 + b"\xff")
    with pytest.raises(ValueError, match=r"primer\.txt.*\b6\b"):
        load_primer_text(str(path))
    assert load_primer_text(str(path), errors="replace") == "ééé\ufffd"


@settings(max_examples=50)
@given(TEXTS)
def test_dialogues_are_the_blocks_that_are_not_blank(text):
    assert primer_dialogues(text) == naive_blocks(text)


@settings(max_examples=50)
@given(TEXTS, st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.integers(0, 100))
def test_split_is_by_whole_dialogue(text, val_frac, seed):
    train, val = split_primer_dialogues(text, val_frac=val_frac, seed=seed)
    assert (train, val) == naive_split(text, val_frac, seed)
    # No dialogue is lost, cut, or in both parts.
    assert sorted(naive_blocks(train) + naive_blocks(val)) == sorted(naive_blocks(text))


def test_another_delimiter():
    text = "a--b--c--d"
    assert split_primer_dialogues(text, val_frac=0.5, seed=5, delimiter="--") == naive_split(text, 0.5, 5, "--")
    assert split_primer_dialogues(text, val_frac=0.5, seed=5) == (text, "")


def test_a_tenth_is_held_out_by_default():
    text = DELIMITER.join(f"block {i}" for i in range(20))
    train, val = split_primer_dialogues(text, seed=0)
    assert (len(train.split(DELIMITER)), len(val.split(DELIMITER))) == (18, 2)


@pytest.fixture
def primer(tmp_path):
    """Writes a primer of these blocks; returns its path."""

    def write(*blocks):
        path = tmp_path / "primer.txt"
        path.write_bytes(DELIMITER.join(blocks).encode())
        return path

    return write


GOOD = "user: {0}?\nassistant: {0}."


def test_a_sample_per_dialogue(primer):
    path = primer(
        "system: be brief.\nuser: who is niels?\nassistant: niels is here.",
        "user: hi\nassistant: one\n\n  two: three\nuser: \tmore \nassistant: é\n",
    )
    chats = [
        [("system", "be brief."), ("user", "who is niels?"), ("assistant", "niels is here.")],
        [("user", "hi"), ("assistant", "one\n\n  two: three"), ("user", "more"), ("assistant", "é")],
    ]
    wanted = [
        ChatSample([ChatMessage(*turn) for turn in chat], "primer", {"dialogue": i}) for i, chat in enumerate(chats)
    ]
    assert list(iter_primer_sft(path)) == list(iter_primer_sft(str(path))) == wanted


def test_the_embedded_primer_parses_completely(caplog):
    caplog.set_level(logging.INFO)
    blocks = naive_blocks(PRIMER.read_bytes().decode("utf-8"))
    stats = {}
    found = list(iter_primer_sft(PRIMER, stats=stats))
    assert len(found) == len(blocks) >= 200
    assert [sample.meta["dialogue"] for sample in found] == list(range(len(blocks)))
    for sample, block in zip(found, blocks, strict=True):
        turns = [{"role": message.role, "content": message.content} for message in sample.messages]
        assert format_chat(turns) == block.removesuffix("\n") + "\nassistant: "
        assert sample.source == "primer"
    assert (stats, dropped_lines(caplog)) == ({}, [])


def test_the_default_file(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "primer.txt").write_text("user: a\nassistant: b", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (found,) = iter_primer_sft()
    assert found.messages == [ChatMessage("user", "a"), ChatMessage("assistant", "b")]


@pytest.mark.parametrize(
    "bad",
    [
        "no turn at all",
        "before\nuser: a\nassistant: b",
        "User: a\nAssistant: b",
        "user: \nassistant: b",
        "user: a\nassistant: \nuser: c\nassistant: d",
        "user: a",
        "user: a\nassistant: ",  # a prompt, no reply
        "system: a\nuser: b\n",
    ],
)
def test_invalid_dialogues_are_dropped_and_counted(primer, caplog, bad):
    caplog.set_level(logging.INFO)
    stats = {}
    found = iter_primer_sft(primer(GOOD.format("a"), bad, GOOD.format("b"), bad), stats=stats)
    assert next(found).messages == [ChatMessage("user", "a?"), ChatMessage("assistant", "a.")]
    assert dropped_lines(caplog) == []
    assert [sample.messages[1].content for sample in found] == ["b."]
    ((reason, number),) = stats.items()
    assert number == 2
    (line,) = dropped_lines(caplog)
    assert "primer" in line
    assert f"2 {reason}" in line


def test_a_closing_prompt_is_no_turn(primer):
    (found,) = iter_primer_sft(primer("user: a\nassistant: b\nassistant: "))
    assert found.messages == [ChatMessage("user", "a"), ChatMessage("assistant", "b")]


@pytest.mark.parametrize(
    "text",
    [
        "user: a?\r\nassistant: a.\r\n\r\n<dialogue>\r\n\r\nuser: b?\r\nassistant: b.\r\n",
        "user: a?\nassistant: a.\n<dialogue>\nuser: b?\nassistant: b.\n",
    ],
    ids=["other line ends", "no empty lines"],
)
def test_no_message_holds_a_delimiter(tmp_path, text):
    """Two dialogues never become one message with the delimiter inside: they are split, or dropped and counted."""
    path = tmp_path / "primer.txt"
    path.write_bytes(text.encode())
    stats = {}
    found = list(iter_primer_sft(path, stats=stats))
    assert [m.content for sample in found for m in sample.messages if "<dialogue>" in m.content] == []
    assert len(found) == 2 or sum(stats.values()) > 0


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "primer.txt"
    path.write_bytes(b"\xef\xbb\xbfuser: a\nassistant: b")
    (found,) = iter_primer_sft(path, errors="replace", delimiter="\n---\n")
    assert found.messages == [ChatMessage("user", "a"), ChatMessage("assistant", "b")]


@pytest.mark.parametrize("take", [0, 2, 9])
def test_take_counts_valid_dialogues(primer, take):
    path = primer("no turn", *map(GOOD.format, "abc"))
    assert [sample.meta["dialogue"] for sample in iter_primer_sft(path, take=take)] == [1, 2, 3][:take]


# --- chat files --------------------------------------------------------------------------------------


def test_a_chat_file_is_a_primer(tmp_path):
    rows = [{"prompt": f"ask {i}", "completion": f"answer {i}", "id": i} for i in range(3)]
    path = write_rows(tmp_path / "chats.jsonl", [*rows, {"prompt": "x", "completion": None, "id": 3}])
    stats = {}
    found = list(iter_primer_sft(path, stats=stats))
    assert found == [
        ChatSample([ChatMessage("user", f"ask {i}"), ChatMessage("assistant", f"answer {i}")], "primer",
                   {"id": i, "row": i})
        for i in range(3)
    ]  # fmt: skip
    assert stats == {"without completion": 1}
    assert list(iter_primer_sft(path, take=1)) == found[:1]
    assert "prompt/completion" in primer_layout(path)


def test_a_chat_file_as_the_text_of_a_primer(tmp_path, caplog):
    """What would read as another turn or dialogue is dropped: a transcript escapes nothing."""
    forged = ("a\nuser: b", "a\n\n<dialogue>\n\nb")
    rows = [{"prompt": "ask", "completion": reply} for reply in ("one", *forged, "two user: fine")]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    text = chat_file_text(str(path))
    assert primer_dialogues(text) == ["user: ask\nassistant: one", "user: ask\nassistant: two user: fine"]
    (line,) = dropped_lines(caplog)
    assert "primer: dropped 2 chats" in line


def test_a_chat_file_of_unknown_columns(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [{"frage": "a", "antwort": "b"}])
    for read in (lambda path: list(iter_primer_sft(path)), primer_layout, chat_file_text):
        with pytest.raises(ValueError) as caught:
            read(str(path))
        assert all(part in str(caught.value) for part in (str(path), "frage, antwort", "data.sources", "columns:"))
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        list(iter_primer_sft(tmp_path / "gone.jsonl"))
