"""Threads of one small tree, as the specification has it."""

from niels_gpt.data.oasst1 import reconstruct_threads
from niels_gpt.data.types import ChatMessage

#               root
#              /    \
#          reply    other
#            |        |
#         more      else
#            |        |
#         last      end
RECORDS = [
    {"message_id": "root", "parent_id": None, "role": "prompter", "text": "what is a tree?"},
    {"message_id": "reply", "parent_id": "root", "role": "assistant", "text": "a plant."},
    {"message_id": "more", "parent_id": "reply", "role": "prompter", "text": "how tall?"},
    {"message_id": "last", "parent_id": "more", "role": "assistant", "text": "up to 116 m."},
    {"message_id": "other", "parent_id": "root", "role": "assistant", "text": "a graph."},
    {"message_id": "else", "parent_id": "other", "role": "prompter", "text": "which graph?"},
    {"message_id": "end", "parent_id": "else", "role": "assistant", "text": "one without cycles."},
]
RECORDS = [{**record, "message_tree_id": "root", "lang": "en"} for record in RECORDS]


def test_a_thread_per_leaf():
    first, second = reconstruct_threads(RECORDS)
    assert first.messages == [
        ChatMessage("user", "what is a tree?"),
        ChatMessage("assistant", "a plant."),
        ChatMessage("user", "how tall?"),
        ChatMessage("assistant", "up to 116 m."),
    ]
    assert second.messages == [
        ChatMessage("user", "what is a tree?"),
        ChatMessage("assistant", "a graph."),
        ChatMessage("user", "which graph?"),
        ChatMessage("assistant", "one without cycles."),
    ]
    assert first.source == second.source == "oasst1"


def test_max_messages_is_enforced():
    lengths = {n: [len(s.messages) for s in reconstruct_threads(RECORDS, max_messages=n)] for n in (1, 2, 3, 4, 5)}
    assert lengths == {1: [1], 2: [2, 2], 3: [3, 3], 4: [4, 4], 5: [4, 4]}
    cut = reconstruct_threads(RECORDS, max_messages=3)
    assert [[m.content for m in thread.messages] for thread in cut] == [
        ["what is a tree?", "a plant.", "how tall?"],
        ["what is a tree?", "a graph.", "which graph?"],
    ]


def test_meta_has_the_message_ids():
    first, second = (thread.meta for thread in reconstruct_threads(RECORDS))
    assert first["message_ids"] == ["root", "reply", "more", "last"]
    assert second["message_ids"] == ["root", "other", "else", "end"]
    assert (first["leaf_message_id"], second["leaf_message_id"]) == ("last", "end")
    assert first["message_tree_id"] == second["message_tree_id"] == "root"


def test_meta_of_a_cut_thread_ends_at_the_cut():
    first, second = (thread.meta for thread in reconstruct_threads(RECORDS, max_messages=2))
    assert (first["message_ids"], first["leaf_message_id"]) == (["root", "reply"], "reply")
    assert (second["message_ids"], second["leaf_message_id"]) == (["root", "other"], "other")
