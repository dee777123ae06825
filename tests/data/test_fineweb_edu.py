import copy
import dataclasses
import gzip
import inspect
import itertools
import json
import logging
import time

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.types import PretrainSample
from tests.data import RowHub

ID = "HuggingFaceFW/fineweb-edu"


def numbered(n):
    return [
        {"text": f"page {i}", "id": f"<urn:{i}>", "url": f"https://example.org/{i}", "score": i / 2} for i in range(n)
    ]


def texts(samples):
    return [sample.text for sample in samples]


@pytest.fixture
def serve(monkeypatch):
    """A function that puts a Hub with these rows in the place of the real one."""
    return lambda rows: RowHub(rows).install(monkeypatch)


@pytest.fixture
def no_rest(monkeypatch):
    """`datasets` rests for 5 s after a shuffled stream of parquet files; not here."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def shuffled(rows, seed, buffer_size):
    """The order of `datasets` itself."""
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    return [row["text"] for row in stream.shuffle(seed=seed, buffer_size=buffer_size)]


# --- as the spec has it ------------------------------------------------------------------------------


def test_the_signature():
    parameters = inspect.signature(iter_fineweb_edu).parameters
    wanted = {
        "name": "CC-MAIN-2024-10",
        "split": "train",
        "streaming": True,
        "shuffle": True,
        "shuffle_buffer_size": 10_000,
        "seed": 42,
        "take": None,
    }
    assert {name: parameters[name].default for name in wanted} == wanted
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert all(parameter.default is None for name, parameter in parameters.items() if name not in wanted)


def test_what_is_asked_of_the_hub_by_default(serve):
    hub = serve(numbered(5))
    assert len(list(iter_fineweb_edu())) == 5
    assert hub.calls == [((ID, "CC-MAIN-2024-10"), {"split": "train", "streaming": True})]
    assert hub.shuffles == [{"seed": 42, "buffer_size": 10_000, "max_buffer_input_shards": 1}]


def test_what_is_asked_of_the_hub_otherwise(serve):
    hub = serve(numbered(5))
    list(iter_fineweb_edu(name="sample-10BT", split="test", seed=7, shuffle_buffer_size=3))
    list(iter_fineweb_edu(streaming=False, shuffle=False))
    list(iter_fineweb_edu(shuffle=False))
    assert hub.calls == [
        ((ID, "sample-10BT"), {"split": "test", "streaming": True}),
        ((ID, "CC-MAIN-2024-10"), {"split": "train", "streaming": False}),
        ((ID, "CC-MAIN-2024-10"), {"split": "train", "streaming": True}),
    ]
    assert hub.shuffles == [{"seed": 7, "buffer_size": 3, "max_buffer_input_shards": 1}]


@pytest.mark.parametrize("streaming", [True, False])
def test_samples(serve, streaming):
    serve(numbered(2))
    assert list(iter_fineweb_edu(streaming=streaming, shuffle=False)) == [
        PretrainSample("page 0", "fineweb_edu", {"id": "<urn:0>", "url": "https://example.org/0", "score": 0.0}),
        PretrainSample("page 1", "fineweb_edu", {"id": "<urn:1>", "url": "https://example.org/1", "score": 0.5}),
    ]


def test_samples_are_frozen(serve):
    serve(numbered(1))
    sample = next(iter_fineweb_edu())
    assert dataclasses.is_dataclass(sample)
    assert [field.name for field in dataclasses.fields(sample)] == ["text", "source", "meta"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.text = "other"


@pytest.mark.parametrize("streaming", [True, False])
def test_it_is_an_iterator(serve, streaming):
    serve(numbered(2))
    samples = iter_fineweb_edu(streaming=streaming)
    assert iter(samples) is samples
    assert {next(samples).text, next(samples).text} == {"page 0", "page 1"}
    with pytest.raises(StopIteration):
        next(samples)


def test_load_dataset_is_looked_up_when_it_runs(serve):
    serve([{"text": "old"}])
    samples = iter_fineweb_edu()
    serve([{"text": "new"}])
    assert texts(samples) == ["new"]


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 42])
@pytest.mark.parametrize("buffer_size", [1, 7, 30, 1000])
def test_a_seed_is_an_order(serve, seed, buffer_size):
    rows = numbered(30)
    serve(rows)
    found = texts(iter_fineweb_edu(seed=seed, shuffle_buffer_size=buffer_size))
    assert found == shuffled(rows, seed, buffer_size)
    assert found == texts(iter_fineweb_edu(seed=seed, shuffle_buffer_size=buffer_size))
    assert sorted(found) == sorted(row["text"] for row in rows)


@pytest.mark.parametrize("streaming", [True, False])
def test_other_seeds_other_orders(serve, streaming):
    serve(numbered(30))
    orders = {tuple(texts(iter_fineweb_edu(seed=seed, streaming=streaming))) for seed in range(5)}
    assert len(orders) == 5
    pages = [f"page {i}" for i in range(30)]
    assert tuple(pages) not in orders
    assert all(sorted(order) == sorted(pages) for order in orders)


@pytest.mark.parametrize("streaming", [True, False])
def test_without_shuffle_the_order_of_the_rows(serve, streaming):
    hub = serve(numbered(30))
    assert texts(iter_fineweb_edu(shuffle=False, streaming=streaming)) == [f"page {i}" for i in range(30)]
    assert hub.shuffles == []


def test_a_table_is_shuffled_whole(serve):
    serve(numbered(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(42)).tolist()
    assert texts(iter_fineweb_edu(streaming=False, shuffle_buffer_size=2)) == [f"page {i}" for i in order]


@pytest.mark.parametrize("streaming", [True, False])
def test_no_global_generator_moves(serve, random_states, streaming):
    serve(numbered(30))
    before = random_states()
    assert len(list(iter_fineweb_edu(streaming=streaming, shuffle_buffer_size=4))) == 30
    assert random_states() == before


# --- take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("take", [0, 1, 2, 19, 20, 21, 1000])
def test_take_is_the_beginning(serve, streaming, shuffle, take):
    serve(numbered(20))
    options = {"streaming": streaming, "shuffle": shuffle, "shuffle_buffer_size": 6}
    everything = texts(iter_fineweb_edu(**options))
    assert len(everything) == 20
    assert texts(iter_fineweb_edu(**options, take=take)) == everything[:take]


@pytest.mark.parametrize("take", [-1, -100])
def test_a_negative_take_is_refused(serve, take):
    hub = serve(numbered(3))
    with pytest.raises(ValueError, match=str(take)):
        list(iter_fineweb_edu(take=take))
    assert hub.calls == []


def test_take_0_opens_nothing(serve):
    hub = serve(numbered(3))
    assert list(iter_fineweb_edu(take=0)) == []
    assert hub.calls == []


@pytest.mark.parametrize("take", [1, 2, 10, 49])
def test_take_pulls_no_more_rows_than_it_needs(serve, take):
    hub = serve(numbered(50))
    assert len(list(iter_fineweb_edu(take=take, shuffle=False))) == take
    assert hub.pulled == take


@pytest.mark.parametrize("take", [1, 2, 5, 6, 20])
@pytest.mark.parametrize("buffer_size", [1, 2, 10, 40])
def test_take_pulls_no_more_rows_than_it_needs_and_the_buffer(serve, take, buffer_size):
    hub = serve(numbered(100))
    assert len(list(iter_fineweb_edu(take=take, shuffle_buffer_size=buffer_size))) == take
    assert take <= hub.pulled <= take + buffer_size


def test_what_is_left_out_does_not_count(serve):
    hub = serve([{"text": ""}, {"text": "a"}, {"text": " "}, {"text": "b"}, {"text": "c"}, {"text": "d"}])
    assert texts(iter_fineweb_edu(take=2, shuffle=False)) == ["a", "b"]
    assert hub.pulled == 4


@given(n=st.integers(0, 30), take=st.integers(0, 40), streaming=st.booleans(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_take_is_a_prefix_of_the_order_of_the_seed(n, take, streaming, seed):
    with pytest.MonkeyPatch.context() as patch:
        RowHub(numbered(n)).install(patch)
        options = {"streaming": streaming, "seed": seed, "shuffle_buffer_size": 5}
        if n or streaming:
            everything = list(iter_fineweb_edu(**options))
            assert sorted(texts(everything)) == sorted(f"page {i}" for i in range(n))
            assert list(iter_fineweb_edu(**options, take=take)) == everything[:take]


# --- rows that are none ------------------------------------------------------------------------------

ROWS = [
    {"text": "first"},
    {"text": ""},
    {"text": None},
    {"text": 5},
    {"text": "second \ud800 half"},
    {"text": " \n\t\u3000"},
    {"text": ["a", "list"]},
    {"number": 3},
    {"text": "\udfff"},
    {"text": "é 😀\u0000 kept"},
    {"text": b"bytes"},
    {},
    {"text": "\n"},
    {"text": " last\n"},
]
KEPT = ["first", "é 😀\u0000 kept", " last\n"]
LEFT_OUT = {"empty": 3, "without text": 6, "not utf-8": 2}


def left_out(caplog):
    return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]


def test_bad_rows_are_left_out_counted_and_said_once(serve, caplog):
    serve(ROWS)
    stats = {}
    samples = iter_fineweb_edu(shuffle=False, stats=stats)
    with caplog.at_level(logging.INFO):
        found = [next(samples).text for _ in KEPT]
        assert left_out(caplog) == []  # at the end, not before
        assert next(samples, None) is None
    assert found == KEPT
    assert stats == LEFT_OUT
    (message,) = left_out(caplog)
    for part in ("fineweb_edu", "11", "3 empty", "6 without text", "2 not utf-8"):
        assert part in message


def test_bad_rows_are_counted_in_any_order(serve):
    serve(ROWS)
    for seed in range(12):
        stats = {}
        assert sorted(texts(iter_fineweb_edu(seed=seed, stats=stats))) == sorted(KEPT)
        assert stats == LEFT_OUT


def test_it_is_also_said_when_the_iterator_is_closed_early(serve, caplog):
    serve([{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": None}, {"text": "c"}])
    stats = {}
    samples = iter_fineweb_edu(shuffle=False, stats=stats)
    assert [next(samples).text, next(samples).text] == ["a", "b"]
    assert left_out(caplog) == []
    samples.close()
    assert stats == {"empty": 1}
    (message,) = left_out(caplog)
    assert "1 empty" in message and "without text" not in message


def test_it_is_also_said_with_take(serve, caplog):
    serve([{"text": ""}, {"text": ""}, {"text": "a"}, {"text": None}])
    stats = {}
    assert texts(iter_fineweb_edu(shuffle=False, take=1, stats=stats)) == ["a"]
    assert stats == {"empty": 2}
    assert len(left_out(caplog)) == 1


def test_it_is_also_said_when_reading_fails(caplog, monkeypatch):
    def generate():
        yield {"text": "a"}
        yield {"text": ""}
        raise KeyError("a bug in the stream")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(generate))
    stats = {}
    with pytest.raises(ValueError, match="a bug in the stream"):
        list(iter_fineweb_edu(shuffle=False, stats=stats))
    assert stats == {"empty": 1}
    assert len(left_out(caplog)) == 1


def test_nothing_left_out_nothing_said(serve, caplog):
    serve(numbered(3))
    stats = {}
    with caplog.at_level(logging.INFO):
        assert len(list(iter_fineweb_edu(stats=stats))) == 3
    assert stats == {}
    assert left_out(caplog) == []


def test_stats_add_up(serve):
    serve([{"text": "a"}, {"text": ""}])
    stats = {"empty": 5, "another": 1}
    for _ in range(2):
        assert texts(iter_fineweb_edu(stats=stats)) == ["a"]
    assert stats == {"empty": 7, "another": 1}


def test_rows_of_another_kind_are_an_error_with_their_keys(serve):
    serve([{"score": 1, "labels": [1, 2]}, {"score": 2, "labels": []}])
    with pytest.raises(ValueError) as caught:
        list(iter_fineweb_edu())
    assert "score" in str(caught.value) and "labels" in str(caught.value)


@pytest.mark.parametrize("first", [None, 5])
def test_a_first_row_without_text_is_left_out_like_any_other(serve, first):
    serve([{"text": first}, {"text": "a"}, {"text": "b"}])
    stats = {}
    assert texts(iter_fineweb_edu(shuffle=False, stats=stats)) == ["a", "b"]
    assert stats == {"without text": 1}


# --- meta --------------------------------------------------------------------------------------------


def test_another_field_for_the_text(serve):
    serve([{"score": 2, "content": "the content", "url": "u"}, {"score": None, "content": "more", "url": "v"}])
    assert list(iter_fineweb_edu(shuffle=False)) == [
        PretrainSample("the content", "fineweb_edu", {"score": 2, "url": "u"}),
        PretrainSample("more", "fineweb_edu", {"score": None, "url": "v"}),
    ]


def test_nested_and_null_fields_stay(serve):
    serve([{"text": "a", "tags": ["x", "y"], "more": {"k": 1}, "none": None}])
    assert next(iter_fineweb_edu()).meta == {"tags": ["x", "y"], "more": {"k": 1}, "none": None}


@pytest.mark.parametrize("streaming", [True, False])
def test_the_rows_themselves_are_left_alone(serve, streaming):
    rows = numbered(4)
    before = copy.deepcopy(rows)
    serve(rows)
    for sample in iter_fineweb_edu(streaming=streaming):
        sample.meta["mine"] = 1
        del sample.meta["id"]
    assert rows == before
    assert [set(sample.meta) for sample in iter_fineweb_edu(streaming=streaming)] == [{"id", "url", "score"}] * 4


# --- local files -------------------------------------------------------------------------------------


def write_rows(file, rows):
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("place", ["file", "folder", "text", "variable", "map"])
def test_local_rows(tmp_path, monkeypatch, no_rest, suffix, streaming, place):
    folder = tmp_path / "all" / "fineweb-edu"
    folder.mkdir(parents=True)
    file = folder / f"train.{suffix}"
    write_rows(file, numbered(7))
    path = {"file": file, "folder": folder, "text": str(folder)}.get(place)
    if place == "variable":
        monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "all"))
    if place == "map":
        (tmp_path / "map.yaml").write_text(f"{ID}: all/fineweb-edu\n", encoding="utf-8")
        monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "map.yaml"))
    wanted = [
        PretrainSample(
            f"page {i}", "fineweb_edu", {"id": f"<urn:{i}>", "url": f"https://example.org/{i}", "score": i / 2}
        )
        for i in range(7)
    ]
    assert list(iter_fineweb_edu(path=path, streaming=streaming, shuffle=False)) == wanted
    assert list(iter_fineweb_edu(path=path, streaming=streaming, shuffle=False, take=3)) == wanted[:3]
    mixed = list(iter_fineweb_edu(path=path, streaming=streaming))
    assert sorted(mixed, key=lambda sample: sample.text) == wanted
    assert mixed == list(iter_fineweb_edu(path=path, streaming=streaming))


def test_local_rows_go_through_load_dataset(tmp_path, monkeypatch):
    write_rows(tmp_path / "train.jsonl", numbered(2))
    calls, load = [], datasets.load_dataset

    def spy(*args, **kwargs):
        calls.append((args[0], kwargs["split"], kwargs["streaming"]))
        return load(*args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", spy)
    assert len(list(iter_fineweb_edu(path=tmp_path))) == 2
    assert calls == [("json", "train", True)]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_text_file_is_a_document(tmp_path, streaming):
    (tmp_path / "b.txt").write_text("one\n\ntwo é\n  three  \n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("no end of line", encoding="utf-8")
    (tmp_path / "c.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "d.txt").write_text("", encoding="utf-8")
    stats = {}
    samples = list(iter_fineweb_edu(path=tmp_path, streaming=streaming, shuffle=False, stats=stats))
    assert samples == [
        PretrainSample("no end of line", "fineweb_edu", {}),
        PretrainSample("one\n\ntwo é\n  three  \n", "fineweb_edu", {}),
    ]
    assert stats == {"empty": 2}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet", "txt"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_document_of_10_mb(tmp_path, no_rest, suffix, streaming):
    big = "é" + "0123456789" * 1_048_576 + " end"
    if suffix == "txt":
        (tmp_path / "train-0.txt").write_text(big, encoding="utf-8")
        (tmp_path / "train-1.txt").write_text("small", encoding="utf-8")
    else:
        write_rows(tmp_path / f"train.{suffix}", [{"text": big}, {"text": "small"}])
    found = texts(iter_fineweb_edu(path=tmp_path, streaming=streaming, shuffle=False))
    assert [len(text) for text in found] == [len(big), 5]
    assert found == [big, "small"]


def test_a_document_of_10_mb_from_the_hub(serve):
    big = "x" * 10 * 2**20
    serve([{"text": big}, {"text": "small"}, {"text": "\n" * 2**20}])
    assert sorted(texts(iter_fineweb_edu()), key=len) == ["small", big]


@pytest.mark.parametrize("streaming", [True, False])
def test_local_rows_of_mixed_kinds_are_left_out_and_counted(tmp_path, streaming):
    lines = [{"text": "a"}, {"text": None}, {"text": ""}, {"other": 1}, {"text": 5}, {"text": "b", "other": 2}]
    write_rows(tmp_path / "train.jsonl", lines)
    stats = {}
    samples = list(iter_fineweb_edu(path=tmp_path, streaming=streaming, shuffle=False, stats=stats))
    assert texts(samples) == ["a", "b"]
    assert samples[1].meta == {"other": 2}
    assert stats == {"without text": 3, "empty": 1}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_local_split_that_is_not_there(tmp_path, streaming):
    write_rows(tmp_path / "train.jsonl", numbered(2))
    write_rows(tmp_path / "test.jsonl", numbered(3))
    assert len(list(iter_fineweb_edu(path=tmp_path, split="test", streaming=streaming))) == 3
    with pytest.raises(ValueError) as caught:
        list(iter_fineweb_edu(path=tmp_path, split="nosuch", streaming=streaming))
    for part in (str(tmp_path), "nosuch", "test, train"):
        assert part in str(caught.value)


def test_a_part_of_a_local_split(tmp_path):
    write_rows(tmp_path / "train.jsonl", numbered(10))
    found = texts(iter_fineweb_edu(path=tmp_path, split="train[2:5]", streaming=False, shuffle=False))
    assert found == ["page 2", "page 3", "page 4"]
    with pytest.raises(ValueError, match=r"train\[2:5\]"):
        list(iter_fineweb_edu(path=tmp_path, split="train[2:5]", shuffle=False))


def test_the_config_is_a_sub_folder_where_there_is_one(tmp_path):
    for name in ("CC-MAIN-2024-10", "sample-10BT"):
        (tmp_path / "data" / name).mkdir(parents=True)
        write_rows(tmp_path / "data" / name / "train-0.jsonl", [{"text": f"of {name}"}])
    assert texts(iter_fineweb_edu(path=tmp_path)) == ["of CC-MAIN-2024-10"]
    assert texts(iter_fineweb_edu(path=tmp_path, name="sample-10BT")) == ["of sample-10BT"]


def test_an_edited_file_is_read_anew(tmp_path):
    for content in ("old", "new"):
        write_rows(tmp_path / "train.jsonl", [{"text": content}])
        assert texts(iter_fineweb_edu(path=tmp_path, streaming=False)) == [content]
        assert texts(iter_fineweb_edu(path=tmp_path)) == [content]


def test_a_missing_local_path(tmp_path):
    with pytest.raises(ValueError) as caught:
        list(iter_fineweb_edu(path=tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(caught.value) and ID in str(caught.value)


def test_local_errors_are_not_waited_for(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    (tmp_path / "train.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError):
        list(itertools.islice(iter_fineweb_edu(path=tmp_path), 1))
    assert pauses == []


@pytest.mark.parametrize("take", [1, 5, 20])
def test_take_pulls_no_more_from_many_shards(monkeypatch, take):
    pulled = []

    def generate(shards):
        for shard in shards:
            for i in range(50):
                pulled.append((shard, i))
                yield {"text": f"{shard} {i}"}

    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(12))})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    assert len(list(iter_fineweb_edu(take=take, shuffle_buffer_size=10))) == take
    assert take <= len(pulled) <= take + 10
