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


@pytest.mark.parametrize("context", ["", " \r\n\t ", "\u3000\u2028", None])
def test_a_blank_context_adds_nothing(serve, context):
    for made in (stored, streamed):
        serve(made([row(0, context=context)]))
        stats = {}
        (found,) = iter_dolly_sft(stats=stats)
        assert found.messages == [ChatMessage("user", "do 0"), ChatMessage("assistant", "done 0")]
        assert stats == {}


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


def test_category_and_id_if_present(serve):
    rows = [
        row(0, category="open_qa", id=0),
        row(1, category=None, id=None),
        {"instruction": "do", "response": "done", "id": "a7"},
    ]
    serve(streamed(rows))
    first, second, third = (sample.meta for sample in iter_dolly_sft(shuffle=False))
    assert first == {"category": "open_qa", "id": 0, "row": 0}
    assert second == {"row": 1}
    assert third == {"id": "a7", "row": 2}


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


def test_shuffled_with_42_by_default(serve):
    serve(stored(ROWS))
    assert list(iter_dolly_sft()) == list(iter_dolly_sft(shuffle=True, seed=42))
    assert rows_of(iter_dolly_sft()) != list(range(30))


BAD = [
    ({"instruction": " \n"}, "without instruction"),
    ({"response": None}, "without response"),
    ({"instruction": b"do"}, "whose instruction is no text"),
    ({"response": True}, "whose response is no text"),
    ({"context": ["about"]}, "whose context is no text"),
    ({"instruction": "half \ud83d"}, "whose instruction is not utf-8"),
    ({"response": "\udc00"}, "whose response is not utf-8"),
    ({"context": "x\ud800y"}, "whose context is not utf-8"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD)
def test_bad_rows_are_dropped_and_counted(serve, fields, reason):
    serve(streamed([row(0), row(1, **fields), row(2), {**row(3), **fields}]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == [0, 2]
    assert stats == {reason: 2}


@pytest.mark.parametrize(("key", "dropped"), [("instruction", True), ("response", True), ("context", False)])
def test_rows_with_a_missing_field(serve, key, dropped):
    serve(streamed([row(0), {name: value for name, value in row(1).items() if name != key}]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == ([0] if dropped else [0, 1])
    assert stats == ({f"without {key}": 1} if dropped else {})


@pytest.mark.parametrize("key", ["instruction", "context"])
def test_a_jsonl_column_that_datasets_parses_as_dates_is_dropped(tmp_path, key):
    """Only if every value looks like a date; `datasets` does not keep the original text."""
    write_rows(tmp_path / "train.jsonl", [row(i, **{key: f"1937-05-{10 + i}"}) for i in range(3)])
    stats = {}
    assert list(iter_dolly_sft(path=tmp_path, stats=stats)) == []
    assert stats == {f"whose {key} is no text": 3}


@pytest.mark.parametrize("take", [0, 2, 9])
def test_take_counts_valid_rows(serve, take):
    serve(stored([row(0, response=""), row(1), row(2), row(3)]))
    assert rows_of(iter_dolly_sft(shuffle=False, take=take)) == [1, 2, 3][:take]
