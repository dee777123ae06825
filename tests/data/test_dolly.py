import copy
import functools
import gzip
import json
import logging
import time

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.types import ChatMessage, ChatSample
from tests.data import serve_in_turn

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
    """Rows as they are, whatever is in them."""
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.fixture
def serve(monkeypatch):
    return functools.partial(serve_in_turn, monkeypatch)


def pair(one):
    """The two messages that a good row becomes, said once more."""
    asked = one["instruction"]
    if (one.get("context") or "").strip() != "":
        asked = asked + "\n\n" + "context:" + "\n" + one["context"]
    return [ChatMessage("user", asked), ChatMessage("assistant", one["response"])]


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


@settings(max_examples=60)
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


def test_category_and_id_where_there_are_some(serve):
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


def test_meta_is_plain_and_of_one_sample_alone(serve):
    serve(stored(ROWS))
    found = list(iter_dolly_sft())
    for sample in found:
        assert type(sample.meta["row"]) is int
        assert json.loads(json.dumps(sample.meta)) == sample.meta
    found[0].meta["more"] = 1
    assert all("more" not in sample.meta for sample in found[1:])


@pytest.mark.parametrize("made", [stored, streamed])
def test_the_row_is_that_of_the_unshuffled_dataset(serve, made):
    serve(made(ROWS))
    found = list(iter_dolly_sft(seed=3))
    assert rows_of(found) != list(range(30))
    assert sorted(rows_of(found)) == list(range(30))
    for sample in found:
        assert sample.messages == pair(ROWS[sample.meta["row"]])
        assert sample.meta["category"] == ROWS[sample.meta["row"]]["category"]


@pytest.mark.parametrize("made", [stored, streamed])
@pytest.mark.parametrize("shuffle", [True, False])
def test_left_out_rows_keep_their_number(serve, made, shuffle):
    rows = [row(i, response=None if i % 3 == 0 else f"done {i}") for i in range(12)]
    serve(made(rows))
    found = list(iter_dolly_sft(shuffle=shuffle))
    assert sorted(rows_of(found)) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert all(sample.messages == pair(rows[sample.meta["row"]]) for sample in found)


def test_more_rows_than_are_taken_at_once(serve):
    rows = [row(i) for i in range(2500)]
    serve(stored(rows))
    assert [(s.meta["row"], s.messages) for s in iter_dolly_sft(shuffle=False)] == list(enumerate(map(pair, rows)))
    found = list(iter_dolly_sft(seed=5))
    assert sorted(rows_of(found)) == list(range(2500))
    assert all(sample.messages == pair(rows[sample.meta["row"]]) for sample in found)


COMMIT = "bdd27f4d94b9c1f951818a7da7fd7aeea5dbff1a"


def test_the_revision_of_what_was_downloaded(serve):
    made = stored(ROWS)
    made.info.download_checksums = {f"hf://datasets/{ID}@{COMMIT}/databricks-dolly-15k.jsonl": {"num_bytes": 1}}
    serve(made)
    found = list(iter_dolly_sft())
    assert len(found) == 30
    assert {sample.meta["revision"] for sample in found} == {COMMIT}


def test_the_revision_of_what_lies_in_the_cache(serve, tmp_path):
    """The cache of `datasets` has the commit in the names of its folders."""
    import pyarrow

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


def test_no_revision_where_none_is_told(serve):
    serve(stored(ROWS))
    assert not any("revision" in sample.meta for sample in iter_dolly_sft())


# --- order -------------------------------------------------------------------------------------------


def test_without_a_shuffle_the_order_is_that_of_the_rows(serve):
    for made in (stored, streamed):
        serve(made(ROWS))
        for seed in (0, 1):
            assert rows_of(iter_dolly_sft(shuffle=False, seed=seed)) == list(range(30))


def test_the_order_depends_on_the_seed_alone(serve):
    serve(stored(ROWS))
    orders = {seed: rows_of(iter_dolly_sft(seed=seed)) for seed in range(5)}
    for seed, order in orders.items():
        assert rows_of(iter_dolly_sft(seed=seed, include_system=True)) == order
    assert len({tuple(order) for order in orders.values()}) == 5
    assert all(sorted(order) == list(range(30)) for order in orders.values())


def test_shuffled_with_42_by_default(serve):
    serve(stored(ROWS))
    assert list(iter_dolly_sft()) == list(iter_dolly_sft(shuffle=True, seed=42))
    assert rows_of(iter_dolly_sft()) != list(range(30))


def test_no_global_generator_is_moved(serve, random_states):
    serve(stored(ROWS))
    before = random_states()
    assert len(list(iter_dolly_sft(seed=1))) == 30
    assert random_states() == before


def test_no_global_generator_is_read(serve):
    import random

    import numpy as np

    serve(stored(ROWS))
    wanted = rows_of(iter_dolly_sft())
    random.seed(1)
    np.random.seed(1)
    assert rows_of(iter_dolly_sft()) == wanted


def test_no_global_generator_is_moved_while_a_failure_is_waited_out(serve, random_states, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    calls = serve(ConnectionError("reset by peer"), stored(ROWS))
    before = random_states()
    assert len(list(iter_dolly_sft())) == 30
    assert (len(calls), len(pauses)) == (2, 1)
    assert random_states() == before


# --- take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [0, 1, 7, 30, 99, None])
@pytest.mark.parametrize("shuffle", [True, False])
def test_take_is_a_part_of_the_whole(serve, take, shuffle):
    serve(stored(ROWS))
    whole = list(iter_dolly_sft(shuffle=shuffle))
    assert len(whole) == 30
    assert list(iter_dolly_sft(shuffle=shuffle, take=take)) == whole[:take]


def test_take_counts_what_is_given(serve):
    serve(stored([row(i, instruction="" if i < 3 else f"do {i}") for i in range(8)]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, take=2, stats=stats)) == [3, 4]
    assert sum(stats.values()) == 3


def test_a_negative_take_is_an_error(serve):
    serve(stored(ROWS))
    with pytest.raises(ValueError, match="take"):
        list(iter_dolly_sft(take=-1))


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
def test_rows_without_text_are_left_out_and_counted(serve, made, fields, key):
    serve(made([row(0), row(1, **fields), row(2), row(3, **fields)]))
    stats = {}
    assert rows_of(iter_dolly_sft(shuffle=False, stats=stats)) == [0, 2]
    ((reason, number),) = stats.items()
    assert key in reason
    assert number == 2


@pytest.mark.parametrize(("fields", "key"), ODD)
def test_rows_with_something_else_are_left_out_and_counted(serve, fields, key):
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


def test_rows_of_something_else_are_not_passed_over_in_silence(serve):
    serve(datasets.Dataset.from_dict({"foo": ["a", "b"]}))
    stats = {}
    assert list(iter_dolly_sft(stats=stats)) == []
    assert sum(stats.values()) == 2


def test_rows_are_left_alone(serve):
    rows = [*ROWS, row(99, response=None)]
    before = copy.deepcopy(rows)
    serve(streamed(rows))
    assert len(list(iter_dolly_sft(include_system=True))) == 30
    assert rows == before


# --- what is said ------------------------------------------------------------------------------------


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("niels_gpt")]


FAULTY = [row(0), row(1, response=""), row(2, instruction=None), row(3, response=None), row(4)]


def test_reasons_are_said_once_at_the_end(serve, caplog):
    caplog.set_level(logging.INFO)
    serve(stored(FAULTY))
    stats = {}
    found = iter_dolly_sft(shuffle=False, stats=stats)
    assert next(found).meta["row"] == 0
    assert said(caplog) == []
    assert rows_of(found) == [4]
    assert sorted(stats.values()) == [1, 2]
    (line,) = said(caplog)
    assert "dolly" in line
    assert "3" in line
    for reason, number in stats.items():
        assert f"{number} {reason}" in line


def test_said_without_stats_too(serve, caplog):
    serve(stored(FAULTY))
    assert len(list(iter_dolly_sft())) == 2
    assert len(said(caplog)) == 1


def test_said_when_taken_or_left_early(serve, caplog):
    serve(stored(FAULTY))
    assert rows_of(iter_dolly_sft(shuffle=False, take=2)) == [0, 4]
    assert len(said(caplog)) == 1
    caplog.clear()
    found = iter_dolly_sft(shuffle=False)
    next(found), next(found)
    found.close()
    assert len(said(caplog)) == 1


def test_nothing_is_said_where_nothing_is_dropped(serve, caplog):
    caplog.set_level(logging.INFO)
    serve(stored(ROWS))
    assert len(list(iter_dolly_sft())) == 30
    assert said(caplog) == []


def test_counts_add_up_over_calls(serve):
    serve(stored(FAULTY))
    stats = {}
    list(iter_dolly_sft(stats=stats))
    once = dict(stats)
    list(iter_dolly_sft(stats=stats))
    assert stats == {reason: 2 * number for reason, number in once.items()}


# --- where the rows come from ------------------------------------------------------------------------


def test_asks_for_the_id_and_the_split(serve):
    calls = serve(stored(ROWS))
    assert len(list(iter_dolly_sft())) == 30
    assert len(list(iter_dolly_sft(split="test", shuffle=False))) == 30
    assert [args for args, _ in calls] == [(ID,), (ID,)]
    assert [kwargs["split"] for _, kwargs in calls] == ["train", "test"]


def test_a_call_after_another_reads_again(serve):
    serve(stored(ROWS))
    assert len(list(iter_dolly_sft())) == 30
    serve(stored(ROWS[:3]))
    assert len(list(iter_dolly_sft())) == 3


def test_an_empty_dataset(serve):
    serve(stored([]))
    stats = {}
    assert list(iter_dolly_sft(stats=stats)) == []
    assert stats == {}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        data = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows).encode("utf-8")
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


LOCAL = [*ROWS, row(30, instruction="é\u2028\r\n", context="\x00\U0001f600"), row(31, response=None)]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.parquet", "databricks-dolly-15k.jsonl"])
def test_local_files(tmp_path, name):
    write(tmp_path / "data" / name, LOCAL)
    for path in (tmp_path / "data" / name, str(tmp_path / "data")):
        stats = {}
        found = list(iter_dolly_sft(path=path, shuffle=False, stats=stats))
        assert [(sample.meta["row"], sample.messages) for sample in found] == list(enumerate(map(pair, LOCAL[:31])))
        assert [sample.meta["category"] for sample in found] == [one["category"] for one in LOCAL[:31]]
        assert sum(stats.values()) == 1
        assert not any("revision" in sample.meta for sample in found)


def test_every_format_gives_the_same_samples_in_the_same_order(tmp_path, serve):
    names = ["a.jsonl", "a.jsonl.gz", "a.parquet"]
    for name in names:
        write(tmp_path / name, LOCAL)
    first, *others = ([*iter_dolly_sft(path=tmp_path / name, seed=9)] for name in names)
    serve(stored(LOCAL))
    others.append([*iter_dolly_sft(seed=9)])
    assert len(first) == 31
    assert all(other == first for other in others)


@pytest.mark.parametrize("folder", ["databricks-dolly-15k", ID])
def test_the_environment_names_a_folder(tmp_path, monkeypatch, folder):
    write(tmp_path / folder / "train.jsonl.gz", ROWS)
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    assert [sample.messages for sample in iter_dolly_sft(shuffle=False)] == [pair(one) for one in ROWS]


@pytest.mark.parametrize("name", ["databricks-dolly-15k", ID])
def test_the_environment_names_a_map(tmp_path, monkeypatch, name):
    write(tmp_path / "mine" / "rows.parquet", ROWS)
    (tmp_path / "map.yaml").write_text(f"{name}: {tmp_path}/mine/rows.parquet\n", encoding="utf-8")
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "map.yaml"))
    assert [sample.messages for sample in iter_dolly_sft(shuffle=False)] == [pair(one) for one in ROWS]


def test_a_path_goes_before_the_environment(tmp_path, monkeypatch):
    write(tmp_path / "databricks-dolly-15k" / "train.jsonl", ROWS)
    write(tmp_path / "mine.jsonl", ROWS[4:5])
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    (found,) = iter_dolly_sft(path=tmp_path / "mine.jsonl")
    assert found.messages == pair(ROWS[4])


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
    write(tmp_path / "train.jsonl", rows)
    stats = {}
    assert rows_of(iter_dolly_sft(path=tmp_path, shuffle=False, stats=stats)) == [0, 6]
    assert sum(stats.values()) == 5


@pytest.mark.parametrize("key", ["instruction", "context", "response"])
def test_a_jsonl_column_that_datasets_takes_for_dates_is_left_out_and_said(tmp_path, key):
    """Only where every value looks like a date; what was written there cannot be had back."""
    write(tmp_path / "train.jsonl", [row(i, **{key: f"1937-05-{10 + i}"}) for i in range(3)])
    stats = {}
    assert list(iter_dolly_sft(path=tmp_path, stats=stats)) == []
    assert stats == {f"whose {key} is no text": 3}


def test_half_a_surrogate_pair_in_a_jsonl_is_counted_or_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row(0), row(1, response="\ud83d"))), encoding="utf-8")
    stats = {}
    try:
        found = rows_of(iter_dolly_sft(path=path, stats=stats))
    except ValueError as err:
        assert str(path) in str(err)
        assert "line 2" in str(err)
    else:
        assert found == [0]
        assert sum(stats.values()) == 1


def test_reading_files_moves_no_global_generator(tmp_path, random_states):
    write(tmp_path / "train.jsonl", ROWS)
    before = random_states()
    assert len(list(iter_dolly_sft(path=tmp_path))) == 30
    assert random_states() == before


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        list(iter_dolly_sft(path=tmp_path / "nowhere"))


def test_neither_network_nor_files():
    """The message names both ways out."""
    with pytest.raises(ValueError, match="NIELS_GPT_DATA") as caught:
        list(iter_dolly_sft())
    assert ID in str(caught.value)
    assert "path" in str(caught.value)
    assert "Hub" in str(caught.value)
