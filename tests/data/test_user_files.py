import gzip
import json
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.config import SourceConfig
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from niels_gpt.data.user_files import iter_user_files, kind_of, user_file_paths

USER_HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BAD_ROLE = "with a role other than system, user, assistant"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def write_rows(path, rows):
    """Rows in the format that the name of the file says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return path


def read(place, *, stats=None, **options):
    """All samples of a place; the options of a config among those of the function."""
    config = {key: options.pop(key) for key in ("kind", "field") if key in options}
    return list(iter_user_files("mine", SourceConfig(str(place), **config), stats=stats, **options))


def said(samples):
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


def test_empty_files_are_counted_and_said_once(tmp_path, caplog):
    for name, text in (("a.txt", ""), ("b.txt", " \n\t"), ("c.txt", "c"), ("d.md", "\n")):
        write(tmp_path / name, text)
    stats = {}
    with caplog.at_level(logging.WARNING, logger="niels_gpt.data"):
        assert said(read(tmp_path, stats=stats)) == ["c"]
    assert stats == {"empty": 3}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "mine" in line and "3" in line and "empty" in line


@pytest.mark.parametrize("name", ["a.txt", "a.md", "train.txt", "test.md"])
def test_a_single_file_is_one_document(tmp_path, name):
    write(tmp_path / "other.txt", "another")
    file = write(tmp_path / name, "one\n\ntwo\n")
    assert read(file) == [PretrainSample("one\n\ntwo\n", "mine", {"path": name})]


def test_a_place_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "notes" / "a.md", "at home")
    assert said(read("~/notes")) == ["at home"]
    assert user_file_paths("mine", SourceConfig("~/notes")) == [str(tmp_path / "notes" / "a.md")]


def test_a_place_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notes" / "a.md", "here")
    assert said(read("notes")) == ["here"]
    assert said(read("notes/a.md")) == ["here"]


def test_a_file_that_is_not_utf8(tmp_path):
    write(tmp_path / "a.txt", "fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    assert str(tmp_path / "b.txt") in str(caught.value)
    assert "offset 3" in str(caught.value) and "0xe9" in str(caught.value)
    assert said(read(tmp_path, errors="replace")) == ["fine", "caf\ufffd au lait"]


def test_take_of_texts(tmp_path):
    for i in range(5):
        write(tmp_path / f"{i}.txt", f"text {i}" if i != 1 else " ")
    for take, wanted in ((0, []), (1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 2, 3, 4]), (None, [0, 2, 3, 4])):
        assert said(read(tmp_path, take=take)) == [f"text {i}" for i in wanted]


@pytest.mark.parametrize("take", [0, 1, 2])
def test_take_reads_no_more_than_it_gives(tmp_path, take):
    for i in range(take):
        write(tmp_path / f"{i}.txt", f"text {i}")
    (tmp_path / "z.txt").write_bytes(b"\xff, which nobody asked for")
    assert said(read(tmp_path, take=take)) == [f"text {i}" for i in range(take)]


def test_samples_come_one_at_a_time(tmp_path):
    write(tmp_path / "a.txt", "first")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    samples = iter_user_files("mine", SourceConfig(str(tmp_path)))
    assert next(samples).text == "first"
    with pytest.raises(ValueError, match=r"b\.txt"):
        next(samples)


def test_texts_are_shuffled_by_the_seed(tmp_path):
    wanted = [f"text {i}" for i in range(8)]
    for i, text in enumerate(wanted):
        write(tmp_path / f"{i}.txt", text)
    orders = [said(read(tmp_path, shuffle=True, seed=seed)) for seed in (1, 1, 2, 3)]
    assert said(read(tmp_path)) == wanted
    assert all(sorted(order) == wanted for order in orders)
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1, "never shuffled"


@pytest.mark.parametrize("split", ["validation", "test", "trian"])
def test_texts_have_one_split(tmp_path, split):
    write(tmp_path / "a.txt", "a")
    with pytest.raises(ValueError, match=rf"no split '{split}'; it has train"):
        read(tmp_path, split=split)


def test_hidden_folders_are_no_part_of_it(tmp_path):
    """A vault of notes keeps the settings of its editor beside them."""
    write(tmp_path / "note.md", "a note")
    write(tmp_path / ".obsidian" / "app.json", "{}")
    config = SourceConfig(str(tmp_path))
    assert kind_of("mine", config) == "text"
    assert said(read(tmp_path)) == ["a note"]
    assert user_file_paths("mine", config) == [str(tmp_path / "note.md")]


@pytest.mark.parametrize(
    ("name", "text"), [("NOTE.TXT", "a text"), ("Note.Md", "a text"), ("A.JSONL", '{"text": "a text"}\n')]
)
def test_suffixes_in_capitals(tmp_path, name, text):
    file = write(tmp_path / name, text)
    assert said(read(file)) == ["a text"]
    assert said(read(tmp_path)) == ["a text"]
    assert user_file_paths("mine", SourceConfig(str(tmp_path))) == [str(file)]


def test_a_compressed_text_is_read_or_refused_but_not_misread(tmp_path):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(b"a text", mtime=0))
    try:
        assert said(read(file)) == ["a text"]
    except ValueError as err:
        assert "gz" in str(err).replace(str(file), "")  # it says that the compression is what it cannot read


# --- rows with a text --------------------------------------------------------------------------------

ROWS = [{"text": f"text {i} ü\n", "id": i, "lang": "de"} for i in range(4)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.json"])
@pytest.mark.parametrize("folder", [True, False])
def test_rows_with_a_text(tmp_path, name, folder):
    file = write_rows(tmp_path / "rows" / name, ROWS)
    samples = read(file.parent if folder else file)
    assert samples == [PretrainSample(f"text {i} ü\n", "mine", {"id": i, "lang": "de", "row": i}) for i in range(4)]
    assert kind_of("mine", SourceConfig(str(file))) == "text"


def test_a_json_file_that_is_a_list(tmp_path):
    write(tmp_path / "rows.json", json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    assert said(read(tmp_path)) == ["a", "b"]


def test_another_field(tmp_path):
    rows = [{"title": f"t{i}", "body": f"body {i}", "text": "not this"} for i in range(3)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    assert read(file, field="body") == [
        PretrainSample(f"body {i}", "mine", {"title": f"t{i}", "text": "not this", "row": i}) for i in range(3)
    ]
    assert said(read(file)) == ["not this"] * 3


def test_without_a_text_the_first_string_field_is_the_text(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"n": i, "story": f"story {i}", "title": "t"} for i in range(2)])
    samples = read(file)
    assert said(samples) == ["story 0", "story 1"]
    assert samples[0].meta["n"] == 0 and samples[1].meta["row"] == 1


def test_the_text_does_not_stand_in_the_meta_once_more(tmp_path):
    """meta is the row's other fields, whichever field was the text."""
    file = write_rows(tmp_path / "a.jsonl", [{"n": 5, "story": "long " * 100}])
    (sample,) = read(file)
    assert sample.meta == {"n": 5, "row": 0}


def test_rows_without_a_text_are_counted_by_reason(tmp_path, caplog):
    rows = [{"text": "good"}, {"text": None}, {"text": ""}, {"text": " \n"}, {}, {"other": 1}, {"text": "too"}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    stats = {"empty": 10}
    with caplog.at_level(logging.WARNING, logger="niels_gpt.data"):
        samples = read(file, stats=stats)
    assert said(samples) == ["good", "too"]
    assert [sample.meta["row"] for sample in samples] == [0, 6]
    assert stats == {"empty": 12, "without text": 3}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "mine" in line and "rows" in line and "2 empty" in line and "3 without text" in line


def test_a_field_that_no_row_has_leaves_all_out(tmp_path):
    stats = {}
    assert read(write_rows(tmp_path / "a.jsonl", ROWS), field="txet", stats=stats) == []
    assert stats == {"without text": 4}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_take_of_rows(tmp_path, name):
    texts = ["0", "", "2", "3", None, "5"]
    file = write_rows(tmp_path / name, [{"text": text} for text in texts])
    for take, wanted in ((0, []), (1, ["0"]), (2, ["0", "2"]), (4, ["0", "2", "3", "5"]), (9, ["0", "2", "3", "5"])):
        assert said(read(file, take=take)) == wanted


@pytest.mark.parametrize("take", [-1, -5])
def test_a_negative_take(tmp_path, take):
    write(tmp_path / "a.txt", "a")
    with pytest.raises(ValueError, match=rf"take.*{take}"):
        read(tmp_path, take=take)


def test_rows_are_shuffled_by_the_seed_and_keep_their_numbers(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20)])
    orders = {seed: read(file, shuffle=True, seed=seed) for seed in (1, 2)}
    assert read(file, shuffle=True, seed=1) == orders[1]
    assert said(orders[1]) != said(orders[2]) != said(read(file))
    for order in orders.values():
        assert sorted(sample.meta["row"] for sample in order) == list(range(20))
        assert all(sample.text == f"text {sample.meta['row']}" for sample in order)
    assert read(file, shuffle=True, seed=2, take=3) == orders[2][:3]


def test_no_global_generator_is_moved(tmp_path, random_states):
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(5)])
    read(file)  # imports
    before = random_states()
    read(file, shuffle=True)
    assert random_states() == before


def test_splits_by_the_names_of_the_files(tmp_path):
    for name, text in (("train", "t"), ("train-2", "u"), ("validation", "v"), ("dev_2", "w")):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": text}])
    assert sorted(said(read(tmp_path))) == ["t", "u"]
    assert sorted(said(read(tmp_path, split="validation"))) == ["v", "w"]
    with pytest.raises(ValueError, match=r"no split 'test'; it has train, validation"):
        read(tmp_path, split="test")


@pytest.mark.parametrize("kind", ["auto", "text"])
def test_a_folder_with_a_test_split_alone(tmp_path, kind):
    write_rows(tmp_path / "test.jsonl", [{"text": "examined"}])
    assert said(read(tmp_path, split="test", kind=kind)) == ["examined"]


@pytest.mark.parametrize("name", ["dev-diary.jsonl", "test_notes.jsonl", "val.parquet", "poems-00000-of-00001.jsonl"])
def test_a_file_that_is_named_itself_is_read_whatever_it_is_called(tmp_path, name):
    """It is the user's source; that its name begins like that of a split is chance."""
    assert said(read(write_rows(tmp_path / name, ROWS[:1]))) == ["text 0 ü\n"]


@pytest.mark.parametrize("name", ["README.md", "notes/about.md"])
def test_rows_win_over_a_readme_beside_them(tmp_path, name):
    write(tmp_path / name, "# how these rows were made")
    file = write_rows(tmp_path / "train.jsonl", [{"text": "a row"}])
    assert said(read(tmp_path)) == ["a row"]
    assert user_file_paths("mine", SourceConfig(str(tmp_path))) == [str(file)]


def test_two_kinds_of_rows_are_one_clear_error(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS)
    write_rows(tmp_path / "b.parquet", ROWS)
    with pytest.raises(ValueError, match=r"\.jsonl and \.parquet"):
        read(tmp_path)


# --- rows with messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "chat"])
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz", "chats.parquet"])
def test_rows_with_messages(tmp_path, name, kind):
    system = [{"role": "system", "content": "be ü brief"}, *USER_HI]
    file = write_rows(tmp_path / name, [{"messages": USER_HI, "id": 7}, {"messages": system, "id": 8}])
    assert kind_of("mine", SourceConfig(str(file), kind=kind)) == "chat"
    hi = [ChatMessage("user", "hi"), ChatMessage("assistant", "hello")]
    assert read(file, kind=kind) == [
        ChatSample(hi, "mine", {"id": 7, "row": 0}),
        ChatSample([ChatMessage("system", "be ü brief"), *hi], "mine", {"id": 8, "row": 1}),
    ]


def test_messages_in_another_field(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"conversation": USER_HI, "text": "a title"}])
    assert kind_of("mine", SourceConfig(str(file), field="conversation")) == "chat"
    (sample,) = read(file, field="conversation")
    assert said([sample]) == [[("user", "hi"), ("assistant", "hello")]]
    assert sample.meta == {"text": "a title", "row": 0}
    assert kind_of("mine", SourceConfig(str(file))) == "text"
    assert said(read(file)) == ["a title"]


def test_the_kind_can_be_forced(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": "a title", "messages": USER_HI}])
    assert said(read(file)) == [[("user", "hi"), ("assistant", "hello")]]
    assert said(read(file, kind="text")) == ["a title"]
    assert said(read(file, kind="chat")) == [[("user", "hi"), ("assistant", "hello")]]
    stats = {}
    assert read(write_rows(tmp_path / "b.jsonl", ROWS), kind="chat", stats=stats) == []
    assert stats == {"without messages": 4}


def test_what_is_no_chat_is_counted_by_reason(tmp_path, caplog):
    def one(**message):
        return {"messages": [message]}

    rows = [
        {"messages": USER_HI},
        {"messages": []},
        {"messages": None},
        {},
        one(role="bot", content="x"),
        one(role="User", content="x"),
        one(content="nobody said this"),
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
    assert [sample.meta["row"] for sample in samples] == [0, 14]
    assert stats == {"without messages": 3, BAD_ROLE: 5, "with an empty message": 5}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 without messages" in line and f"5 {BAD_ROLE}" in line and "5 with an empty message" in line


def test_a_message_keeps_its_white_space_and_drops_what_it_also_says(tmp_path):
    file = write_rows(
        tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": " hi\n", "name": "ann", "weight": 0}]}]
    )
    assert said(read(file)) == [[("user", " hi\n")]]


def test_a_bad_first_row_does_not_make_text_of_chats(tmp_path):
    """`auto`: chat where the rows have messages."""
    file = write_rows(tmp_path / "a.jsonl", [{"messages": None, "id": 0}, *[{"messages": USER_HI, "id": 1}] * 3])
    stats = {}
    assert len(read(file, stats=stats)) == 3
    assert stats == {"without messages": 1}


def test_take_shuffle_and_splits_of_chats(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(10)]
    write_rows(tmp_path / "train.jsonl", [{"messages": []}, *rows])
    write_rows(tmp_path / "validation.jsonl", rows[:2])
    train = [[("user", f"q{i}")] for i in range(10)]
    assert said(read(tmp_path)) == train
    assert said(read(tmp_path, take=2)) == train[:2]
    assert said(read(tmp_path, split="validation")) == train[:2]
    mixed = said(read(tmp_path, shuffle=True, seed=3))
    assert mixed != train and sorted(mixed) == sorted(train)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.one_of(TEXTS, st.none()), min_size=1, max_size=8))
def test_texts_are_what_a_naive_reader_finds(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("rows")
    file = write_rows(folder / "rows.jsonl", [{"text": text, "n": 1} for text in texts])
    stats = {}
    wanted = [(i, text) for i, text in enumerate(texts) if text is not None and text.strip()]
    assert [(s.meta["row"], s.text) for s in read(file, stats=stats)] == wanted
    empty = sum(text is not None and not text.strip() for text in texts)
    assert stats == {k: n for k, n in (("empty", empty), ("without text", texts.count(None))) if n}


# --- what cannot be read -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [read, lambda place: kind_of("mine", SourceConfig(str(place)))])
def test_a_place_that_is_not_there(tmp_path, function):
    with pytest.raises(FileNotFoundError, match=r"mine.*no such place") as caught:
        function(tmp_path / "no such place")
    assert str(tmp_path / "no such place") in str(caught.value)


def test_nothing_that_can_be_read(tmp_path):
    write(tmp_path / "table.csv", "a,b")
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    for part in (str(tmp_path), ".txt", ".md", ".jsonl", ".parquet"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"table\.csv"):
        read(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', "line 2"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abcdefgh"}\n' * 50, mtime=0)[:-12], "gzip"),
        ("a.jsonl.gz", b'{"text": "a"}\n', "gzip"),
        ("a.parquet", b"PAR1 but nothing behind it", "parquet"),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "text", "chat"])
def test_a_damaged_file_is_one_line_that_names_it_and_the_place(tmp_path, name, data, said, kind):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read(tmp_path, kind=kind)
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert said in message.replace(str(tmp_path / name), "")
    assert "\n" not in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_folder_that_may_not_be_read(tmp_path, name):
    write(tmp_path / name, '{"text": "a"}\n')
    locked = write(tmp_path / "locked" / name, '{"text": "b"}\n').parent
    locked.chmod(0)
    try:
        with pytest.raises(OSError, match="locked"):
            read(tmp_path)
    finally:
        locked.chmod(0o755)


# --- the files of a source ---------------------------------------------------------------------------


def test_own_files(tmp_path):
    names = ["b.txt", "a.md", "sub/c.txt", "x.png"]
    for name in names:
        write(tmp_path / "texts" / name, "t")
    config = SourceConfig(str(tmp_path / "texts"))
    assert user_file_paths("mine", config) == [
        str(tmp_path / "texts" / name) for name in ("a.md", "b.txt", "sub/c.txt")
    ]
    assert user_file_paths("mine", SourceConfig(str(tmp_path / "texts" / "b.txt"))) == [
        str(tmp_path / "texts" / "b.txt")
    ]
    rows = [write_rows(tmp_path / "rows" / name, ROWS) for name in ("a.jsonl", "b.jsonl.gz", "sub/c.jsonl")]
    write(tmp_path / "rows" / "README.md", "about")
    assert user_file_paths("mine", SourceConfig(str(tmp_path / "rows"))) == [str(file) for file in rows]
    with pytest.raises(FileNotFoundError, match="gone"):
        user_file_paths("mine", SourceConfig(str(tmp_path / "gone")))
