"""User-defined sources: text files, rows with a text, rows with messages, and their errors."""

import gzip
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.config import SourceConfig
from niels_gpt.data.row_layout import UnknownColumns
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from niels_gpt.data.user_files import FIRST_ROWS, iter_user_files, kind_of, user_file_paths
from tests.data import write_rows

USER_HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BAD_ROLE = "with a role other than system, user, assistant"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def read(path, *, stats=None, **options):
    """Return all samples of a path; `options` are those of the config and of the loader."""
    config = {key: options.pop(key) for key in ("kind", "field", "columns") if key in options}
    return list(iter_user_files("mine", SourceConfig(str(path), **config), stats=stats, **options))


def contents(samples):
    return [
        [(m.role, m.content) for m in sample.messages] if isinstance(sample, ChatSample) else sample.text
        for sample in samples
    ]


# --- text files --------------------------------------------------------------------------------------


def test_a_folder_of_texts_sorted_by_path_every_character_kept(tmp_path):
    for name, text in {
        "b.txt": "b\r\nsecond line\n",
        "a.md": "\ufeff# a\n",
        "sub/deep/c.md": "c ü 中 😀",
        "sub.txt": "between",
        "B.md": "upper",
    }.items():
        write(tmp_path / name, text)
    write(tmp_path / "picture.png", "no text")
    write(tmp_path / "code.py", "x = 1")
    (tmp_path / "folder.md").mkdir()
    samples = read(tmp_path)
    assert samples == [
        PretrainSample("upper", "mine", {"path": "B.md"}),
        PretrainSample("\ufeff# a\n", "mine", {"path": "a.md"}),
        PretrainSample("b\r\nsecond line\n", "mine", {"path": "b.txt"}),
        PretrainSample("between", "mine", {"path": "sub.txt"}),
        PretrainSample("c ü 中 😀", "mine", {"path": "sub/deep/c.md"}),
    ]
    assert user_file_paths("mine", SourceConfig(str(tmp_path))) == [str(tmp_path / s.meta["path"]) for s in samples]


@pytest.mark.parametrize("name", ["a.md", "train.txt"])
def test_a_single_file_is_one_document(tmp_path, name):
    write(tmp_path / "other.txt", "another")
    file = write(tmp_path / name, "one\n\ntwo\n")
    assert read(file) == [PretrainSample("one\n\ntwo\n", "mine", {"path": name})]


def test_a_compressed_text_is_one_document(tmp_path):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(b"one\r\ntwo", mtime=0))
    for path in (file, tmp_path):
        assert read(path) == [PretrainSample("one\r\ntwo", "mine", {"path": "a.txt.gz"})]
        assert user_file_paths("mine", SourceConfig(str(path))) == [str(file)]
    write(tmp_path / "b.md", "plain")
    assert contents(read(tmp_path)) == ["one\r\ntwo", "plain"]
    file.write_bytes(gzip.compress(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"a\.txt\.gz is not utf-8.*offset 3"):
        read(tmp_path)
    file.write_bytes(gzip.compress(b"one" * 99)[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.gz: the gzip data is damaged"):
        read(file)


def test_paths_in_the_home_and_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "notes" / "a.md", "here")
    for path in ("notes", "notes/a.md", "~/notes"):
        assert contents(read(path)) == ["here"]
        assert user_file_paths("mine", SourceConfig(path)) == [str(tmp_path / "notes" / "a.md")]


def test_a_file_that_is_not_utf8(tmp_path):
    write(tmp_path / "a.txt", "fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    assert str(tmp_path / "b.txt") in str(caught.value)
    assert "offset 3" in str(caught.value) and "0xe9" in str(caught.value)
    assert contents(read(tmp_path, errors="replace")) == ["fine", "caf\ufffd au lait"]


@pytest.mark.parametrize("take", [0, 1, 2])
def test_take_reads_no_more_than_it_yields(tmp_path, take):
    for i in range(take):
        write(tmp_path / f"{i}.txt", f"text {i}")
    (tmp_path / "z.txt").write_bytes(b"\xff")
    assert contents(read(tmp_path, take=take)) == [f"text {i}" for i in range(take)]


def test_hidden_folders_are_skipped(tmp_path):
    """A folder of notes may contain the settings of an editor."""
    write(tmp_path / "note.md", "a note")
    write(tmp_path / ".obsidian" / "app.json", "{}")
    config = SourceConfig(str(tmp_path))
    assert kind_of("mine", config) == "text"
    assert contents(read(tmp_path)) == ["a note"]
    with pytest.raises(ValueError, match=r"'validation'.*train"):
        read(tmp_path, split="validation")
    assert user_file_paths("mine", config) == [str(tmp_path / "note.md")]


@pytest.mark.parametrize(
    ("name", "text"), [("NOTE.TXT", "a text"), ("Note.Md", "a text"), ("A.JSONL", '{"text": "a text"}\n')]
)
def test_suffixes_in_capitals(tmp_path, name, text):
    file = write(tmp_path / name, text)
    assert contents(read(file)) == ["a text"]
    assert contents(read(tmp_path)) == ["a text"]
    assert user_file_paths("mine", SourceConfig(str(tmp_path))) == [str(file)]


# --- rows with a text --------------------------------------------------------------------------------

ROWS = [{"text": f"text {i} ü\n", "id": i, "lang": "de"} for i in range(4)]


@pytest.mark.parametrize(
    ("name", "folder"), [("rows.jsonl", True), ("rows.jsonl.gz", False), ("rows.parquet", True), ("rows.json", False)]
)
def test_rows_with_a_text(tmp_path, name, folder):
    file = write_rows(tmp_path / "rows" / name, ROWS)
    samples = read(file.parent if folder else file)
    assert samples == [PretrainSample(f"text {i} ü\n", "mine", {"id": i, "lang": "de", "row": i}) for i in range(4)]
    assert kind_of("mine", SourceConfig(str(file))) == "text"


def test_a_json_file_that_is_a_list(tmp_path):
    write(tmp_path / "rows.json", json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    assert contents(read(tmp_path)) == ["a", "b"]


def test_another_field(tmp_path):
    rows = [{"title": f"t{i}", "body": f"body {i}", "text": "not this"} for i in range(3)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    assert read(file, field="body") == [
        PretrainSample(f"body {i}", "mine", {"title": f"t{i}", "text": "not this", "row": i}) for i in range(3)
    ]
    assert contents(read(file)) == ["not this"] * 3
    with pytest.raises(UnknownColumns, match=r"'txet'.*title, body, text"):
        read(file, field="txet")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_column_of_the_text(tmp_path, suffix):
    """`text`, `content`, or the only column of text; what describes a document is none."""

    def texts(**row):
        samples = read(write_rows(tmp_path / f"a.{suffix}", [row]))
        assert all(sample.meta == {**{k: row[k] for k in row if row[k] != "it"}, "row": 0} for sample in samples)
        return contents(samples)

    assert texts(n=1, story="it") == ["it"]
    assert texts(url="u", id="7", date="2020-01-01", language="en", story="it") == ["it"]
    assert texts(title="t", text="it", url="u") == texts(title="t", content="it") == ["it"]
    assert texts(url="it") == ["it"]
    for row in ({"title": "t", "story": "s"}, {"text": "q", "answer": "a"}, {"n": 1}, {"a": [1], "b": None}):
        with pytest.raises(UnknownColumns) as caught:
            texts(**row)
        message = str(caught.value)
        assert all(part in message for part in (", ".join(row), "data.sources.mine", "field:", "columns: {user:"))
    assert contents(read(write_rows(tmp_path / "b.jsonl", [{"text": "q", "answer": "a"}]), kind="text")) == ["q"]


def test_rows_without_a_text_are_counted_by_reason(tmp_path, caplog):
    rows = [{"text": "good"}, {"text": None}, {"text": ""}, {"text": " \n"}, {}, {"other": 1}, {"text": "too"}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    stats = {"empty": 10}
    with caplog.at_level(logging.WARNING, logger="niels_gpt.data"):
        samples = read(file, stats=stats)
    assert contents(samples) == ["good", "too"]
    assert [sample.meta["row"] for sample in samples] == [0, 6]
    assert stats == {"empty": 12, "without text": 3}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "mine" in line and "rows" in line and "2 empty" in line and "3 without text" in line


def test_lone_surrogates(tmp_path):
    """A text with one is dropped; in metadata they are replaced, so that they can be printed."""
    rows = [r'{"text": "ok", "title": "\ud800x?", "n": [{"a": "\udfff"}, 1]}', r'{"text": "bad \ud800"}']
    stats = {}
    (sample,) = read(write(tmp_path / "a.jsonl", "\n".join(rows)), stats=stats)
    assert sample.meta == {"title": "?x?", "n": [{"a": "?"}, 1], "row": 0}
    assert stats == {"not utf-8": 1}


def test_rows_are_shuffled_by_the_seed_and_keep_their_numbers(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20)])
    orders = {seed: read(file, shuffle=True, seed=seed) for seed in (1, 2)}
    assert read(file, shuffle=True, seed=1) == orders[1]
    assert contents(orders[1]) != contents(orders[2]) != contents(read(file))
    for order in orders.values():
        assert sorted(sample.meta["row"] for sample in order) == list(range(20))
        assert all(sample.text == f"text {sample.meta['row']}" for sample in order)
    assert read(file, shuffle=True, seed=2, take=3) == orders[2][:3]


def test_splits_by_the_names_of_the_files(tmp_path):
    for name, text in (("train", "t"), ("train-2", "u"), ("validation", "v"), ("dev_2", "w")):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text}])
    assert sorted(contents(read(tmp_path))) == ["t", "u"]
    assert sorted(contents(read(tmp_path, split="validation"))) == ["v", "w"]
    with pytest.raises(ValueError, match=r"'test'.*train, validation"):
        read(tmp_path, split="test")
    (tmp_path / "only").mkdir()
    write_rows(tmp_path / "only" / "test.jsonl", [{"text": "x"}])
    assert contents(read(tmp_path / "only", split="test")) == ["x"]


@pytest.mark.parametrize("name", ["test_notes.jsonl", "val.parquet"])
def test_a_single_file_is_read_whatever_its_name(tmp_path, name):
    """Its name may begin like that of a split."""
    assert contents(read(write_rows(tmp_path / name, ROWS[:1]))) == ["text 0 ü\n"]


@pytest.mark.parametrize("name", ["README.md", "notes/about.md"])
def test_rows_take_precedence_over_a_readme(tmp_path, name):
    write(tmp_path / name, "# about these rows")
    file = write_rows(tmp_path / "train.jsonl", [{"text": "a row"}])
    assert contents(read(tmp_path)) == ["a row"]
    assert user_file_paths("mine", SourceConfig(str(tmp_path))) == [str(file)]


# --- rows with messages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("chats.jsonl", "auto"), ("chats.jsonl.gz", "chat"), ("chats.parquet", "auto")]
)
def test_rows_with_messages(tmp_path, name, kind):
    system = [{"role": "system", "content": " be ü brief\n", "name": "ann"}, *USER_HI]
    file = write_rows(tmp_path / name, [{"messages": USER_HI, "id": 7}, {"messages": system, "id": 8}])
    assert kind_of("mine", SourceConfig(str(file), kind=kind)) == "chat"
    hi = [ChatMessage("user", "hi"), ChatMessage("assistant", "hello")]
    assert read(file, kind=kind) == [
        ChatSample(hi, "mine", {"id": 7, "row": 0}),
        ChatSample([ChatMessage("system", " be ü brief\n"), *hi], "mine", {"id": 8, "row": 1}),
    ]


def test_messages_in_another_field(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"conversation": USER_HI, "text": "a title"}])
    assert kind_of("mine", SourceConfig(str(file), field="conversation")) == "chat"
    (sample,) = read(file, field="conversation")
    assert contents([sample]) == [[("user", "hi"), ("assistant", "hello")]]
    assert sample.meta == {"text": "a title", "row": 0}
    assert kind_of("mine", SourceConfig(str(file))) == "text"
    assert contents(read(file)) == ["a title"]


def test_the_kind_can_be_forced(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": "a title", "messages": USER_HI}])
    assert contents(read(file)) == [[("user", "hi"), ("assistant", "hello")]]
    assert contents(read(file, kind="text")) == ["a title"]
    assert contents(read(file, kind="chat")) == [[("user", "hi"), ("assistant", "hello")]]
    with pytest.raises(UnknownColumns, match="text, id, lang"):
        read(write_rows(tmp_path / "b.jsonl", ROWS), kind="chat")
    with pytest.raises(ValueError, match=r"a\.txt.*primer"):
        read(write(tmp_path / "a.txt", "a text"), kind="chat")


def test_invalid_chats_are_counted_by_reason(tmp_path, caplog):
    def one(**message):
        return {"messages": [message]}

    rows = [
        {"messages": USER_HI},
        {"messages": []},
        {"messages": None},
        {},
        one(role="bot", content="x"),
        one(role="User", content="x"),
        one(content="without a role"),
        one(role=None, content="x"),
        one(role="user", content=""),
        one(role="user", content=" \n"),
        one(role="user", content=None),
        one(role="user"),
        {"messages": [*USER_HI, {"role": "tool", "content": "x"}]},
        {"messages": [*USER_HI, {"role": "user", "content": ""}]},
        {"messages": USER_HI[:1]},
    ]
    file = write_rows(tmp_path / "a.jsonl", rows)
    stats = {}
    with caplog.at_level(logging.WARNING, logger="niels_gpt.data"):
        samples = read(file, stats=stats)
    assert [sample.meta["row"] for sample in samples] == [0, 12]  # what a tool says is skipped
    assert contents(samples)[0] == contents(samples)[1]
    assert stats == {"without messages": 3, BAD_ROLE: 4, "with an empty message": 5, "without a reply": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(f"{number} {reason}" in line for reason, number in stats.items())


def test_a_bad_first_row_does_not_decide_the_kind(tmp_path):
    """`auto` is chat if a row has messages, within the first FIRST_ROWS rows."""
    file = write_rows(tmp_path / "a.jsonl", [{"messages": None, "id": 0}, *[{"messages": USER_HI, "id": 1}] * 3])
    stats = {}
    assert len(read(file, stats=stats)) == 3
    assert stats == {"without messages": 1}
    for number, kind in ((FIRST_ROWS - 1, "chat"), (FIRST_ROWS, "text")):
        write_rows(file, [{"chat_messages": None, "name": "a name"}] * number + [{"messages": USER_HI}])
        assert kind_of("mine", SourceConfig(str(file))) == kind
    assert FIRST_ROWS == 100
    write_rows(file, [{"messages": None}] * (FIRST_ROWS + 1))
    assert kind_of("mine", SourceConfig(str(file))) == "chat"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(max_examples=25)
@given(st.lists(st.one_of(TEXTS, st.none()), min_size=1, max_size=8))
def test_texts_equal_those_of_a_naive_reader(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("rows")
    file = write_rows(folder / "rows.jsonl", [{"text": text, "n": 1} for text in texts])
    stats = {}
    wanted = [(i, text) for i, text in enumerate(texts) if text is not None and text.strip()]
    assert [(s.meta["row"], s.text) for s in read(file, stats=stats)] == wanted
    empty = sum(text is not None and not text.strip() for text in texts)
    assert stats == {k: n for k, n in (("empty", empty), ("without text", texts.count(None))) if n}


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [kind_of, user_file_paths, lambda *given: list(iter_user_files(*given))])
def test_a_missing_path(tmp_path, function):
    with pytest.raises(FileNotFoundError, match=rf"mine.*{tmp_path}/nowhere"):
        function("mine", SourceConfig(str(tmp_path / "nowhere")))


def test_unknown_formats(tmp_path):
    write(tmp_path / "table.csv", "a,b")
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    for part in (str(tmp_path), ".txt", ".md", ".jsonl", ".parquet"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"table\.csv"):
        read(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("name", "kind", "data", "fact"),
    [
        ("a.jsonl", "auto", b'{"text": "a"}\n{"text": "b"\n', "line 2"),
        ("a.jsonl.gz", "chat", b'{"text": "a"}\n', "gzip"),
        ("a.parquet", "auto", b"PAR1 and nothing else", "parquet"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, name, data, fact, kind):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read(tmp_path, kind=kind)
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert fact in message.replace(str(tmp_path / name), "")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["rows.csv", "rows"])
def test_an_unknown_format_lists_all_that_are_read(tmp_path, name):
    (tmp_path / name).write_text("a,b", encoding="utf-8")
    with pytest.raises(ValueError, match=name) as caught:
        list(iter_user_files("mine", SourceConfig(str(tmp_path / name))))
    assert all(known in str(caught.value) for known in (".md", ".txt", ".jsonl", ".json", ".json.gz", ".parquet"))
