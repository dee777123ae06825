"""Chat formats as the products write them: the turns, the metadata, and the reasons for dropped rows."""

import gzip
import json
import zipfile

import pytest

from niels_gpt.config import SourceConfig
from niels_gpt.data.chat_formats import InvalidChat, recognize
from niels_gpt.data.row_layout import UnknownColumns
from niels_gpt.data.user_files import iter_user_files, kind_of, user_layout
from tests.data import write_rows


def chats(path, *, stats=None, **config):
    """Return the turns of all chats of a file, as (role, content)."""
    samples = iter_user_files("mine", SourceConfig(str(path), **config), stats=stats)
    return [[(message.role, message.content) for message in sample.messages] for sample in samples]


def turns(row):
    """Return the format of a row and its turns."""
    found = recognize(row)
    return found.name, [(message.role, message.content) for message in found.messages(row)]


def reason(row):
    with pytest.raises(InvalidChat) as caught:
        recognize(row).messages(row)
    return str(caught.value)


# --- pairs -------------------------------------------------------------------------------------------

# The first rows of alpaca_data.json of Stanford Alpaca, shortened.
ALPACA = [
    {"instruction": "Give three tips for staying healthy.", "input": "", "output": "1. Eat well\n2. Move\n3. Sleep"},
    {"instruction": "Identify the odd one out.", "input": "Twitter, Instagram, Telegram", "output": "Telegram"},
]
ALPACA_TURNS = [
    [("user", "Give three tips for staying healthy."), ("assistant", "1. Eat well\n2. Move\n3. Sleep")],
    [("user", "Identify the odd one out.\n\nTwitter, Instagram, Telegram"), ("assistant", "Telegram")],
]


@pytest.mark.parametrize("name", ["alpaca_data.json", "alpaca.jsonl", "alpaca.jsonl.gz", "a.json.gz", "alpaca.parquet"])
def test_alpaca(tmp_path, name):
    path = tmp_path / name
    data = json.dumps(ALPACA, indent=4).encode()
    if name.endswith(".json"):
        path.write_bytes(data)
    elif name == "a.json.gz":
        path.write_bytes(gzip.compress(data))
    else:
        write_rows(path, ALPACA)
    config = SourceConfig(str(path))
    assert kind_of("mine", config) == "chat"
    assert str(user_layout("mine", config)) == "chats: Alpaca (instruction, input, output)"
    assert chats(path) == ALPACA_TURNS
    assert [sample.meta for sample in iter_user_files("mine", config)] == [{"row": 0}, {"row": 1}]


def test_alpaca_with_the_text_of_its_template_system_and_history():
    row = {**ALPACA[1], "text": "### Instruction: ...", "system": "Be brief.", "history": [["Hi", "Hello"], ["a"]]}
    assert turns(row) == (
        "Alpaca",
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), *ALPACA_TURNS[1]],
    )
    assert recognize(row).meta(row) == {"text": "### Instruction: ..."}


@pytest.mark.parametrize(
    ("user", "assistant"),
    [
        *(("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "response")),
        *(("input", "output"), ("query", "response"), ("user", "assistant"), ("human", "assistant")),
    ],
)
def test_pairs(tmp_path, user, assistant):
    rows = [{user: f"ask {i} ->", assistant: f" answer {i}\n", "id": f"id{i}"} for i in range(2)]  # OpenAI's old form
    for name in ("a.jsonl", "a.parquet"):
        path = write_rows(tmp_path / name, rows)
        assert chats(path) == [[("user", f"ask {i} ->"), ("assistant", f"answer {i}")] for i in range(2)]
        assert [s.meta for s in iter_user_files("mine", SourceConfig(str(path)))] == [
            {"id": f"id{i}", "row": i} for i in range(2)
        ]


def test_context_and_system_columns():
    row = {"instruction": "When?", "context": "It opened in 1889.", "response": "In 1889.", "category": "closed_qa"}
    assert turns(row) == ("Dolly", [("user", "When?\n\ncontext:\nIt opened in 1889."), ("assistant", "In 1889.")])
    orca = {"id": "x", "system_prompt": "Think.", "question": "2+2?", "response": "4"}
    assert turns(orca)[1] == [("system", "Think."), ("user", "2+2?"), ("assistant", "4")]
    assert turns({**orca, "system_prompt": ""})[1] == [("user", "2+2?"), ("assistant", "4")]
    conversational = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    assert turns(conversational)[1] == [("user", "a"), ("assistant", "b")]


def test_incomplete_pairs_are_dropped_by_reason(tmp_path):
    good = {"prompt": "a", "completion": "b"}
    bad = [{"prompt": None}, {"prompt": " "}, {"completion": ""}, {"completion": None}]
    stats = {}
    assert len(chats(write_rows(tmp_path / "a.jsonl", [*({**good, **row} for row in bad), good]), stats=stats)) == 1
    assert stats == {"without prompt": 2, "without completion": 2}
    assert reason({**good, "completion": "\ud800"}) == "not utf-8"


def test_two_replies_are_not_a_pair(tmp_path):
    row = {"prompt": "a", "response": "b", "answer": "c"}
    assert recognize(row) is None
    assert turns({**row, "answer": None})[1] == [("user", "a"), ("assistant", "b")]
    with pytest.raises(UnknownColumns, match="prompt, response, answer"):
        chats(write_rows(tmp_path / "a.jsonl", [row]))
    assert chats(tmp_path / "a.jsonl", columns={"user": "prompt", "assistant": "answer"}) == [
        [("user", "a"), ("assistant", "c")]
    ]


def test_columns_of_the_config(tmp_path):
    rows = [{"q": f"ask {i}", "chosen": f"good {i}", "rejected": "bad", "s": "sys"} for i in range(2)]
    for name in ("a.jsonl", "a.parquet"):
        path = write_rows(tmp_path / name, [*rows, {"q": "x", "chosen": None, "rejected": "y", "s": "z"}])
        with pytest.raises(UnknownColumns, match="q, chosen, rejected, s"):
            kind_of("mine", SourceConfig(str(path)))
        stats = {}
        columns = {"user": "q", "assistant": "chosen", "system": "s"}
        assert kind_of("mine", SourceConfig(str(path), columns=columns)) == "chat"
        assert chats(path, columns=columns, stats=stats) == [
            [("system", "sys"), ("user", f"ask {i}"), ("assistant", f"good {i}")] for i in range(2)
        ]
        assert stats == {"without chosen": 1}
        assert chats(path, columns={"user": "q", "assistant": "rejected"})[2] == [("user", "x"), ("assistant", "y")]
        with pytest.raises(UnknownColumns, match=r"'quest'.*q, chosen, rejected, s"):
            chats(path, columns={"user": "quest", "assistant": "chosen"})


# --- lists of messages -------------------------------------------------------------------------------

SHAREGPT = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "human", "value": "Summarize the main ideas.\n"},
        {"from": "gpt", "value": "Here are they:"},
        {"from": "human", "value": "More."},
        {"from": "gpt", "value": "Sure."},
    ],
}
SHAREGPT_TURNS = [
    *(("user", "Summarize the main ideas."), ("assistant", "Here are they:")),
    *(("user", "More."), ("assistant", "Sure.")),
]


@pytest.mark.parametrize("name", ["sg.json", "sg.jsonl", "sg.parquet"])
def test_sharegpt(tmp_path, name):
    path = tmp_path / name
    system = {"id": "b", "conversations": [{"from": "system", "value": "S"}, *SHAREGPT["conversations"][:2]]}
    rows = [SHAREGPT, system]
    if name == "sg.json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        write_rows(path, rows)
    assert chats(path) == [SHAREGPT_TURNS, [("system", "S"), *SHAREGPT_TURNS[:2]]]
    assert str(user_layout("mine", SourceConfig(str(path)))) == "chats: ShareGPT (conversations)"
    (first, _) = iter_user_files("mine", SourceConfig(str(path)))
    assert first.meta == {"id": "QWJhYvA_0", "row": 0}


def test_sharegpt_variants():
    row = {**SHAREGPT, "system": "Be kind.", "tools": "[]"}
    assert turns(row) == ("ShareGPT", [("system", "Be kind."), *SHAREGPT_TURNS])
    with_tools = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather"}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    assert turns({"conversations": with_tools})[1] == [("user", "Weather?"), ("assistant", "It rains.")]
    begins_with_gpt = {"conversations": SHAREGPT["conversations"][1:]}  # a long conversation that was cut
    assert turns(begins_with_gpt)[1] == SHAREGPT_TURNS[1:]
    assert reason({"conversations": [{"from": "narrator", "value": "x"}]}).startswith("with a role other than")
    assert reason({"conversations": [{"from": ["human"], "value": "x"}]}).startswith("with a role other than")
    assert reason({"conversations": [{"from": "human", "value": None}]}) == "with an empty message"
    assert reason({"conversations": SHAREGPT["conversations"][:1]}) == "without a reply"
    assert reason({"conversations": []}) == reason({"conversations": with_tools[1:3]}) == "without messages"


def test_openai_fine_tuning(tmp_path):
    """Lines with different types for the same key, as the API accepts them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zurich"}'}}
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Marv is sarcastic."},
                {"role": "user", "content": "Capital of France?"},
                {"role": "assistant", "content": "Paris, as if everyone doesn't know that already."},
            ]
        },
        {
            "messages": [
                {"role": "developer", "content": "Describe."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                        {"type": "text", "text": "Be brief."},
                    ],
                },
                {"role": "assistant", "content": "A cat."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
                {"role": "assistant", "content": "Rain."},
                {"role": "user", "content": "And"},
                {"role": "user", "content": "tomorrow?"},
                {"role": "assistant", "content": "Sun."},
            ],
            "tools": [{"type": "function"}],
            "parallel_tool_calls": False,
        },
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no", "weight": 0}]},
    ]
    stats = {}
    assert chats(write_rows(tmp_path / "train.jsonl", rows), stats=stats) == [
        [
            ("system", "Marv is sarcastic."),
            ("user", "Capital of France?"),
            ("assistant", "Paris, as if everyone doesn't know that already."),
        ],
        [("system", "Describe."), ("user", "What is this?\n\nBe brief."), ("assistant", "A cat.")],
        [("user", "Weather?"), ("assistant", "Rain."), ("user", "And\n\ntomorrow?"), ("assistant", "Sun.")],
    ]
    assert stats == {"with a reply of weight 0": 1}


def test_formats_may_be_mixed(tmp_path):
    write_rows(tmp_path / "a.jsonl", ALPACA)
    write_rows(tmp_path / "b.jsonl", [SHAREGPT, {"text": "no chat"}])
    stats = {}
    assert chats(tmp_path, stats=stats) == [*ALPACA_TURNS, SHAREGPT_TURNS]
    assert stats == {"without messages": 1}


# --- ChatGPT -----------------------------------------------------------------------------------------


def node(key, parent, role=None, text=None, *, children=(), content_type="text", **message):
    """Return a node of `mapping` as in conversations.json of an export."""
    if role is None:
        return {"id": key, "message": None, "parent": parent, "children": list(children)}
    content = {"content_type": content_type, "parts": text if isinstance(text, list) else [text]}
    return {
        "id": key,
        "message": {
            "id": key,
            "author": {"role": role, "name": None, "metadata": {}},
            "create_time": 1700000000.5,
            "update_time": None,
            "content": message.pop("content", content),
            "status": "finished_successfully",
            "end_turn": True,
            "weight": 1.0,
            "metadata": message.pop("metadata", {}),
            "recipient": message.pop("recipient", "all"),
            "channel": message.pop("channel", None),
        },
        "parent": parent,
        "children": list(children),
    }


def conversation(*nodes, current, title="A title"):
    return {
        "title": title,
        "create_time": 1700000000.1,
        "update_time": 1700000009.1,
        "mapping": {node["id"]: node for node in nodes},
        "moderation_results": [],
        "current_node": current,
        "plugin_ids": None,
        "conversation_id": "c1",
        "default_model_slug": "gpt-4o",
        "id": "c1",
    }


def branched():
    """A regenerated answer, custom instructions, a search, an image, a thought, and the answer that was kept."""
    hidden = {"is_visually_hidden_from_conversation": True}
    image = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x", "width": 10}
    instructions = {"content_type": "user_editable_context", "user_profile": "p", "user_instructions": "i"}
    query = {"content_type": "code", "language": "unknown", "text": "search()"}
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "s", "content": "c"}]}
    return conversation(
        node("root", None, children=["sys"]),
        node("sys", "root", "system", "", metadata=hidden),
        node("custom", "sys", "user", content=instructions, metadata=hidden),
        node("u1", "custom", "user", "Who wrote Faust?", children=["old", "think"]),
        node("old", "u1", "assistant", "I do not know."),
        node("think", "u1", "assistant", content=thoughts),
        node("call", "think", "assistant", content=query, recipient="web"),
        node("found", "call", "tool", "result"),
        node("a1", "found", "assistant", "Goethe.\ue200cite\ue202turn0search1\ue201\n"),
        node("a1b", "a1", "assistant", "In 1808."),
        node("u2", "a1b", "user", [image, "And this?"], content_type="multimodal_text"),
        node("a2", "u2", "assistant", "A portrait of him."),
        node("u3", "a2", "user", [image], content_type="multimodal_text"),
        node("a3", "u3", "assistant", "This one is Schiller."),
        node("u4", "a3", "user", "Thanks"),
        node("a4", "u4", "assistant", ["Any time."]),
        current="a4",
    )


BRANCHED = [
    *(("user", "Who wrote Faust?"), ("assistant", "Goethe.\n\nIn 1808.")),
    *(("user", "And this?"), ("assistant", "A portrait of him.")),
    *(("user", "Thanks"), ("assistant", "Any time.")),
]


def test_chatgpt_follows_the_branch_of_the_current_node():
    row = branched()
    assert turns(row) == ("ChatGPT export", BRANCHED)
    assert turns({**row, "current_node": "old"})[1] == [("user", "Who wrote Faust?"), ("assistant", "I do not know.")]
    assert recognize(row).meta(row) == {"title": "A title", "create_time": 1700000000.1}
    for unknown in (None, "gone", ["a4"]):  # the last leaf of the file
        assert turns({**row, "current_node": unknown})[1] == BRANCHED


def test_chatgpt_trees_that_are_damaged():
    long = [node("0", None)]
    long += [node(str(i), str(i - 1), ("assistant", "user")[i % 2], f"turn {i}") for i in range(1, 20_001)]
    found = turns(conversation(*long, current="20000"))[1]
    assert (len(found), found[0], found[-1]) == (20_000, ("user", "turn 1"), ("assistant", "turn 20000"))
    cycle = conversation(node("a", "b", "user", "x"), node("b", "a", "assistant", "y"), current="b")
    assert reason(cycle) == reason({**cycle, "current_node": "a"}) == "with a cycle of messages"
    assert reason({**cycle, "mapping": {}}) == "without messages"
    lost = conversation(node("a", "gone", "user", "x"), node("b", "a", "assistant", "y"), current="b")
    assert turns(lost)[1] == [("user", "x"), ("assistant", "y")]
    odd = {"n": None, "m": {"message": {"author": None, "content": "x"}, "parent": ["n"]}, "o": {"parent": "m"}}
    assert reason({**lost, "mapping": odd, "current_node": "o"}) == "without messages"


def test_chatgpt_export_with_many_conversations(tmp_path):
    """One column per message would not be feasible; the file is read as a stream."""
    rows = [branched() for _ in range(300)]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    assert chats(path) == [BRANCHED] * 300


# --- Claude ------------------------------------------------------------------------------------------


def message(key, sender, text, parent=None, content=None):
    return {
        "uuid": key,
        "text": text,
        "content": [{"type": "text", "text": text, "citations": []}] if content is None else content,
        "sender": sender,
        "created_at": "2024-05-01T10:00:00.000000Z",
        "updated_at": "2024-05-01T10:00:00.000000Z",
        "attachments": [],
        "files": [],
        **({"parent_message_uuid": parent} if parent else {}),
    }


def claude(*messages, name="Names of rivers"):
    head = {"uuid": "k1", "name": name, "summary": "", "created_at": "2024-05-01T10:00:00.000000Z"}
    return {**head, "account": {"uuid": "me"}, "chat_messages": list(messages)}


def test_claude():
    blocks = [
        {"type": "thinking", "thinking": "hmm"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "search", "input": {}},
        {"type": "tool_result", "content": [{"type": "text", "text": "raw"}]},
        {"type": "text", "text": "The Rhine."},
    ]
    unsupported = "```\nThis block is not supported on your current device yet.\n```\n\nThe Rhine."
    row = claude(
        message("1", "human", "Longest river here? "),
        message("2", "assistant", unsupported, content=blocks),
        message("3", "human", "", content=[]),  # only an attachment
        message("4", "assistant", "This picture shows a dam."),
        message("5", "human", "Thanks", content=[]),  # older exports have only the text
        message("6", "assistant", "Welcome."),
    )
    assert turns(row) == (
        "Claude export",
        [
            *(("user", "Longest river here?"), ("assistant", "Let me look.\n\nThe Rhine.")),
            *(("user", "Thanks"), ("assistant", "Welcome.")),
        ],
    )
    assert recognize(row).meta(row) == {"name": "Names of rivers", "created_at": "2024-05-01T10:00:00.000000Z"}
    assert reason(claude()) == "without messages"


def test_claude_follows_the_last_branch():
    root = "00000000-0000-4000-8000-000000000000"
    first = [message("1", "human", "helo", root), message("2", "assistant", "Pardon?", "1")]
    edited = [message("3", "human", "hello", root), message("4", "assistant", "Hi!", "3")]
    assert turns(claude(*first, *edited))[1] == [("user", "hello"), ("assistant", "Hi!")]
    again = [message("5", "human", "more", "2"), message("6", "assistant", "Yes.", "5")]
    assert turns(claude(*first, *again))[1] == [
        *(("user", "helo"), ("assistant", "Pardon?")),
        *(("user", "more"), ("assistant", "Yes.")),
    ]


# --- exports as they are downloaded ------------------------------------------------------------------

EXPORTS = {
    "chatgpt": ({"user.json": {"id": "u"}, "message_feedback.json": [], "chat.html": "<html>"}, branched, BRANCHED),
    "claude": (
        {"users.json": [{"uuid": "u", "full_name": "n"}], "projects.json": [{"uuid": "p", "name": "n", "docs": []}]},
        lambda: claude(message("1", "human", "a"), message("2", "assistant", "b")),
        [("user", "a"), ("assistant", "b")],
    ),
}


@pytest.mark.parametrize("product", EXPORTS)
@pytest.mark.parametrize("parts", [["conversations.json"], ["conversations-000.json", "conversations-001.json"]])
def test_an_export_as_a_folder_and_as_a_zip(tmp_path, product, parts):
    extras, row, wanted = EXPORTS[product]
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in {**extras, **{part: [row()] for part in parts}}.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert chats(folder) == [wanted] * len(parts)
    with zipfile.ZipFile(tmp_path / "e.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
        archive.writestr("__MACOSX/conversations.json", "no")
    before = sorted(tmp_path.rglob("*"))
    assert chats(tmp_path / "e.zip") == [wanted] * len(parts)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked
