"""The mapping of a dolly row to messages, as the specification has it."""

import datasets
import pytest

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.types import ChatMessage

ROW = {
    "instruction": "When did the bridge open?",
    "context": "The bridge was begun in 1932.\nIt opened in 1937.",
    "response": "In 1937.",
    "category": "closed_qa",
}
QUESTION = "When did the bridge open?\n\ncontext:\nThe bridge was begun in 1932.\nIt opened in 1937."


def sample(monkeypatch, row, **options):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row]))
    (only,) = iter_dolly_sft(**options)
    return only


def test_two_messages(monkeypatch):
    found = sample(monkeypatch, ROW)
    assert found.messages == [ChatMessage("user", QUESTION), ChatMessage("assistant", "In 1937.")]
    assert found.source == "dolly15k"
    assert (found.meta["category"], found.meta["row"]) == ("closed_qa", 0)


def test_three_messages_with_system(monkeypatch):
    assert sample(monkeypatch, ROW, include_system=True).messages == [
        ChatMessage("system", "you are a helpful assistant."),
        ChatMessage("user", QUESTION),
        ChatMessage("assistant", "In 1937."),
    ]


@pytest.mark.parametrize(
    ("context", "added"),
    [
        ("", ""),
        ("one line", "\n\ncontext:\none line"),
        ("two\n\nparts\n", "\n\ncontext:\ntwo\n\nparts\n"),
        ("  indented", "\n\ncontext:\n  indented"),
    ],
)
def test_context_is_formatted_exactly(monkeypatch, context, added):
    found = sample(monkeypatch, {**ROW, "context": context})
    assert found.messages[0].content == "When did the bridge open?" + added
    assert len(found.messages) == 2
