"""dolly: the mapping of rows to chats, their numbers, and dropped rows."""

import functools

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.types import ChatMessage, ChatSample
from tests.data import serve_in_turn, write_rows

ID = "databricks/databricks-dolly-15k"
COLUMNS = ("instruction", "context", "response", "category")


def row(number, **fields):
    made = {
        "instruction": f"do {number}",
        "context": "",
        "response": f"done {number}",
        "category": f"kind {number % 3}",
    }
    return made | fields


ROWS = [row(i, context="" if i % 2 else f"about {i}") for i in range(30)]


def stored(rows, columns=COLUMNS):
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return datasets.Dataset.from_dict({name: [r.get(name) for r in rows] for name in columns}, features=features)


def streamed(rows):
    """A stream of rows, which may hold any values."""
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.fixture
def serve(monkeypatch):
    return functools.partial(serve_in_turn, monkeypatch)


def pair(one):
    """The two messages of a valid row, by an independent implementation."""
    question = one["instruction"]
    if (one.get("context") or "").strip() != "":
        question = question + "\n\n" + "context:" + "\n" + one["context"]
    return [ChatMessage("user", question), ChatMessage("assistant", one["response"])]


def rows_of(samples):
    return [sample.meta["row"] for sample in samples]


# --- mapping -----------------------------------------------------------------------------------------


def test_golden(serve):
    serve(
        stored([
            {"instruction": "Name a tree.", "context": "", "response": "Oak.", "category": "open_qa"},
            {"instruction": " When?\n", "context": "\nIn\t1937. ", "response": "1937\n", "category": "closed_qa"},
        ])
    )  # fmt: skip
    assert list(iter_dolly_sft(shuffle=False)) == [
        ChatSample(
            [ChatMessage("user", "Name a tree."), ChatMessage("assistant", "Oak.")],
            "dolly15k",
            {"category": "open_qa", "row": 0},
        ),
        ChatSample(
            [ChatMessage("user", " When?\n\n\ncontext:\n\nIn\t1937. "), ChatMessage("assistant", "1937\n")],
            "dolly15k",
            {"category": "closed_qa", "row": 1},
        ),
    ]


def test_golden_with_system(serve):
    serve(stored(ROWS[:2]))
    assert [sample.messages for sample in iter_dolly_sft(shuffle=False, include_system=True)] == [
        [
            ChatMessage("system", "you are a helpful assistant."),
            ChatMessage("user", "do 0\n\ncontext:\nabout 0"),
            ChatMessage("assistant", "done 0"),
        ],
        [
            ChatMessage("system", "you are a helpful assistant."),
            ChatMessage("user", "do 1"),
            ChatMessage("assistant", "done 1"),
        ],
    ]


@pytest.mark.parametrize("context", ["", " ", "\n", " \r\n\t ", "\u3000\u2028", None])
def test_a_blank_context_adds_nothing(serve, context):
    for made in (stored, streamed):
        serve(made([row(0, context=context)]))
        stats = {}
        (found,) = iter_dolly_sft(stats=stats)
        assert found.messages == [ChatMessage("user", "do 0"), ChatMessage("assistant", "done 0")]
        assert stats == {}


def test_a_missing_context_adds_nothing(serve):
    rows = [{"instruction": "do", "response": "done"}]
    for made in (stored(rows, ["instruction", "response"]), streamed(rows)):
        serve(made)
        (found,) = iter_dolly_sft()
        assert found.messages == [ChatMessage("user", "do"), ChatMessage("assistant", "done")]
        assert found.meta == {"row": 0}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " \n", "a\r\n", "\ufeffx"]
)


@settings(max_examples=30)
@given(st.lists(st.tuples(TEXTS, st.none() | TEXTS, TEXTS), max_size=6), st.booleans())
def test_every_row_is_mapped_or_counted(texts, shuffle):
    rows = [dict(zip(COLUMNS, text, strict=False)) for text in texts]
    good = [i for i, one in enumerate(rows) if one["instruction"].strip() and one["response"].strip()]
    stats = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: stored(rows))
        found = list(iter_dolly_sft(shuffle=shuffle, stats=stats))
    assert sorted(rows_of(found)) == good
    assert shuffle or rows_of(found) == good
    assert all(sample.messages == pair(rows[sample.meta["row"]]) for sample in found)
    assert sum(stats.values()) == len(rows) - len(good)


# --- meta --------------------------------------------------------------------------------------------


def test_category_and_id_if_present(serve):
    rows = [
        row(0, category="open_qa", id=0),
        row(1, category=None, id=None),
        {"instruction": "do", "response": "done", "id": "a7"},
    ]
    serve(streamed(rows))
    first, second, third = (sample.meta for sample in iter_dolly_sft(shuffle=False))
    assert first == {"category": "open_qa", "id": 0, "row": 0}
    assert second.get("category") is None
    assert second.get("id") is None
    assert second["row"] == 1
    assert third.get("category") is None
    assert (third["id"], third["row"]) == ("a7", 2)


@pytest.mark.parametrize("made", [stored, streamed])
def test_the_row_is_that_of_the_unshuffled_dataset(serve, made):
    serve(made(ROWS))
    found = list(iter_dolly_sft(seed=3))
    assert rows_of(found) != list(range(30))
    assert sorted(rows_of(found)) == list(range(30))
    for sample in found:
        assert sample.messages == pair(ROWS[sample.meta["row"]])
        assert sample.meta["category"] == ROWS[sample.meta["row"]]["category"]


@pytest.mark.parametrize(("made", "shuffle"), [(stored, True), (streamed, False)])
def test_dropped_rows_keep_their_number(serve, made, shuffle):
    rows = [row(i, response=None if i % 3 == 0 else f"done {i}") for i in range(12)]
    serve(made(rows))
    found = list(iter_dolly_sft(shuffle=shuffle))
    assert sorted(rows_of(found)) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert all(sample.messages == pair(rows[sample.meta["row"]]) for sample in found)


def test_more_rows_than_one_chunk(serve):
    rows = [row(i) for i in range(2500)]
    serve(stored(rows))
    assert [(s.meta["row"], s.messages) for s in iter_dolly_sft(shuffle=False)] == list(enumerate(map(pair, rows)))
    found = list(iter_dolly_sft(seed=5))
    assert sorted(rows_of(found)) == list(range(2500))
    assert all(sample.messages == pair(rows[sample.meta["row"]]) for sample in found)


COMMIT = "bdd27f4d94b9c1f951818a7da7fd7aeea5dbff1a"


def test_the_revision_of_the_cache(serve, tmp_path):
    """The cache of `datasets` has the commit in its folder names."""
    folder = tmp_path / "databricks___databricks-dolly-15k" / "default" / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(ROWS)
    file = str(folder / "databricks-dolly-15k-train.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    serve(datasets.Dataset.from_file(file))
    found = list(iter_dolly_sft(shuffle=False))
    assert [sample.messages for sample in found] == [pair(one) for one in ROWS]
    assert {sample.meta["revision"] for sample in found} == {COMMIT}


# --- order -------------------------------------------------------------------------------------------


def test_shuffled_with_42_by_default(serve):
    serve(stored(ROWS))
    assert list(iter_dolly_sft()) == list(iter_dolly_sft(shuffle=True, seed=42))
    assert rows_of(iter_dolly_sft()) != list(range(30))


# --- bad rows ----------------------------------------------------------------------------------------

BAD = [
    ({"instruction": None}, "instruction"),
    ({"instruction": ""}, "instruction"),
    ({"instruction": " \n"}, "instruction"),
    ({"response": None}, "response"),
    ({"response": ""}, "response"),
    ({"response": "\t"}, "response"),
]
ODD = [
    ({"instruction": 7}, "instruction"),
    ({"instruction": ["do"]}, "instruction"),
    ({"instruction": b"do"}, "instruction"),
    ({"response": {"a": 1}}, "response"),
    ({"response": True}, "response"),
    ({"context": 7}, "context"),
    ({"context": ["about"]}, "context"),
    ({"instruction": "half \ud83d"}, "instruction"),
    ({"response": "\udc00"}, "response"),
    ({"context": "x\ud800y"}, "context"),
]


@pytest.mark.parametrize(("fields", "key"), BAD)
@pytest.mark.parametrize("made", [stored, streamed])
def test_rows_without_text_are_dropped_and_counted(serve, made, fields, key):
    serve(made([row(0), row(1, **fields), row(2), row(3, **fields)]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == [0, 2]
    ((reason, number),) = stats.items()
    assert key in reason
    assert number == 2


@pytest.mark.parametrize(("fields", "key"), ODD)
def test_rows_with_other_types_are_dropped_and_counted(serve, fields, key):
    serve(streamed([row(0), row(1, **fields), row(2)]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == [0, 2]
    ((reason, number),) = stats.items()
    assert key in reason
    assert number == 1


@pytest.mark.parametrize("key", ["instruction", "response"])
def test_rows_with_a_missing_field(serve, key):
    rows = [row(0), {name: value for name, value in row(1).items() if name != key}, row(2)]
    serve(streamed(rows))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == [0, 2]
    ((reason, number),) = stats.items()
    assert key in reason
    assert number == 1


def test_columns_of_another_type(serve):
    serve(datasets.Dataset.from_dict({"instruction": ["a", "b"], "context": ["", ""], "response": [1, 2]}))
    stats = {}
    assert list(iter_dolly_sft(stats=stats)) == []
    assert sum(stats.values()) == 2


# --- files -------------------------------------------------------------------------------------------


def test_an_empty_dataset(serve):
    serve(stored([]))
    stats = {}
    assert list(iter_dolly_sft(stats=stats)) == []
    assert stats == {}


LOCAL = [*ROWS, row(30, instruction="é\u2028\r\n", context="\x00\U0001f600"), row(31, response=None)]


def test_bad_rows_in_a_jsonl(tmp_path):
    rows = [
        row(0),
        row(1, response=None),
        row(2, instruction=7),
        {"instruction": "do"},
        row(4, context={"a": [1]}),
        {"context": "alone", "category": "x"},
        row(6),
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    stats = {}
    assert rows_of(iter_dolly_sft(path=tmp_path, shuffle=False, stats=stats)) == [0, 6]
    assert sum(stats.values()) == 5


@pytest.mark.parametrize("key", ["instruction", "context", "response"])
def test_a_jsonl_column_that_datasets_parses_as_dates_is_dropped(tmp_path, key):
    """Only if every value looks like a date; `datasets` does not keep the original text."""
    write_rows(tmp_path / "train.jsonl", [row(i, **{key: f"1937-05-{10 + i}"}) for i in range(3)])
    stats = {}
    assert list(iter_dolly_sft(path=tmp_path, stats=stats)) == []
    assert stats == {f"whose {key} is no text": 3}


@pytest.mark.parametrize("take", [0, 1, 2, 3, 9])
def test_take_counts_valid_rows(serve, take):
    serve(stored([row(0, response=""), row(1), row(2), row(3)]))
    assert rows_of(iter_dolly_sft(shuffle=False, take=take)) == [1, 2, 3][:take]
