"""What all chat formats share, and which format a tokenizer has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.chat.format import check_continues, find_replies, follows, system_messages
from niels_gpt.chat.formats import chat_format, template_format
from niels_gpt.chat.own_formats import RoleIdFormat, TranscriptFormat
from niels_gpt.chat.template_format import TemplateFormat
from niels_gpt.tokenizer import ByteTokenizer, load_tokenizer
from tests import chat_templates, foreign_tokenizers

USER, SYSTEM, ASSISTANT = ({"role": role, "content": "x"} for role in ("user", "system", "assistant"))


def test_only_a_leading_system_message_counts():
    for messages, number in (([], 0), ([USER], 0), ([SYSTEM], 1), ([SYSTEM, USER], 1), ([USER, SYSTEM], 0)):
        assert system_messages(messages) == number


def test_only_a_last_message_of_the_assistant_can_be_continued():
    for messages in ([ASSISTANT], [USER, ASSISTANT]):
        check_continues(messages)
    for messages in ([], [USER], [ASSISTANT, USER]):
        with pytest.raises(ValueError, match="role assistant"):
            check_continues(messages)


SMALL = st.lists(st.integers(0, 3), max_size=20)
START = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@given(SMALL, START)
def test_where_a_sequence_ends(ids, sequence):
    n = len(sequence)
    naive = [ids[max(i + 1 - n, 0) : i + 1] == sequence for i in range(len(ids))]
    assert follows(np.array(ids, dtype=np.int64), sequence).tolist() == naive


@given(SMALL, START, st.sets(st.integers(0, 3), min_size=1, max_size=2))
def test_replies_last_from_a_start_to_the_next_end(ids, start, ends):
    """Against a walk over the ids."""
    expected, at = [], 0
    while at <= len(ids):
        if at >= len(start) and ids[at - len(start) : at] == start:
            end = next((i + 1 for i in range(at, len(ids)) if ids[i] in ends), len(ids))
            if end > at:
                expected.append((at, end))
            at = max(end, at + 1)
        else:
            at += 1
    assert find_replies(np.array(ids, dtype=np.int64), start, sorted(ends)) == expected


def test_the_format_of_each_kind_of_tokenizer(subwords, tmp_path):
    assert type(chat_format(ByteTokenizer())) is TranscriptFormat
    assert type(chat_format(subwords)) is RoleIdFormat
    foreign = load_tokenizer(foreign_tokenizers.make("smollm", tmp_path, chat_template=chat_templates.CHATML))
    found = chat_format(foreign)
    assert type(found) is TemplateFormat
    assert template_format(foreign) is chat_format(foreign) is found  # made once: it starts a process
