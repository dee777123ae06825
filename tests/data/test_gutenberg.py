import copy
import dataclasses
import gzip
import inspect
import json
import logging

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.types import PretrainSample
from tests.data import RowHub

ID = "nikolina-p/gutenberg_clean_en_splits"
RAW = "manu/project_gutenberg"


def books(n):
    return [{"id": i, "text": f"Book {i}\n\nChapter 1\n", "title": f"Title {i}"} for i in range(n)]


def titles(samples):
    return [sample.meta["title"] for sample in samples]


@pytest.fixture
def serve(monkeypatch):
    """A function that puts a Hub with these rows in the place of the real one."""
    return lambda rows: RowHub(rows).install(monkeypatch)


@pytest.fixture
def no_rest(monkeypatch):
    """`datasets` rests for 5 s after a shuffled stream of parquet files; not here."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def write_rows(file, rows):
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


# --- as the spec has it ------------------------------------------------------------------------------


def test_the_signature():
    parameters = inspect.signature(iter_gutenberg).parameters
    wanted = {
        "dataset_id": "nikolina-p/gutenberg_clean_en_splits",
        "split": "train",
        "streaming": True,
        "shuffle": True,
        "shuffle_buffer_size": 10_000,
        "seed": 42,
        "take": None,
    }
    assert {name: parameters[name].default for name in wanted} == wanted
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_what_is_asked_of_the_hub_by_default(serve):
    hub = serve(books(5))
    assert len(list(iter_gutenberg())) == 5
    ((args, kwargs),) = hub.calls
    assert args in ((ID,), (ID, None))
    assert kwargs == {"split": "train", "streaming": True}
    assert hub.shuffles == [{"seed": 42, "buffer_size": 10_000, "max_buffer_input_shards": 1}]


def test_what_is_asked_of_the_hub_otherwise(serve):
    hub = serve(books(5))
    list(iter_gutenberg(dataset_id=RAW, split="en", seed=7, shuffle_buffer_size=3))
    list(iter_gutenberg(streaming=False, shuffle=False))
    list(iter_gutenberg(shuffle=False))
    assert [(args[0], kwargs) for args, kwargs in hub.calls] == [
        (RAW, {"split": "en", "streaming": True}),
        (ID, {"split": "train", "streaming": False}),
        (ID, {"split": "train", "streaming": True}),
    ]
    assert hub.shuffles == [{"seed": 7, "buffer_size": 3, "max_buffer_input_shards": 1}]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("dataset_id", [ID, RAW])
def test_samples(serve, streaming, dataset_id):
    serve(books(2))
    assert list(iter_gutenberg(dataset_id=dataset_id, streaming=streaming, shuffle=False)) == [
        PretrainSample("Book 0\n\nChapter 1\n", "gutenberg", {"id": 0, "title": "Title 0"}),
        PretrainSample("Book 1\n\nChapter 1\n", "gutenberg", {"id": 1, "title": "Title 1"}),
    ]


def test_samples_are_frozen(serve):
    serve(books(1))
    sample = next(iter_gutenberg())
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.source = "other"


def test_the_field_that_holds_the_text(serve):
    rows = [
        {"id": 0, "text": "the text", "body": "no"},
        {"id": 1, "text": None, "body": "the body"},
        {"id": 2, "body": "the first string", "note": "no"},
        {"id": 3, "body": "no", "text": "the text again"},
        {"id": 4, "text": "", "body": "no, for an empty text is a text"},
    ]
    serve(rows)
    samples = list(iter_gutenberg(shuffle=False))
    assert [sample.text for sample in samples] == ["the text", "the body", "the first string", "the text again"]
    assert [sample.meta["id"] for sample in samples] == [0, 1, 2, 3]


def test_no_field_that_holds_a_text(serve):
    serve([{"id": 1, "pages": 300}, {"id": 2, "pages": 20}])
    with pytest.raises(ValueError) as caught:
        list(iter_gutenberg())
    assert "id" in str(caught.value) and "pages" in str(caught.value)


# --- order and take ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 42])
@pytest.mark.parametrize("buffer_size", [1, 7, 1000])
def test_a_seed_is_an_order(serve, seed, buffer_size):
    serve(books(30))
    stream = datasets.IterableDataset.from_generator(lambda: iter(books(30)))
    wanted = [row["title"] for row in stream.shuffle(seed=seed, buffer_size=buffer_size)]
    for _ in range(2):
        assert titles(iter_gutenberg(seed=seed, shuffle_buffer_size=buffer_size)) == wanted


@pytest.mark.parametrize("seed", [0, 42])
def test_a_table_is_shuffled_whole(serve, seed):
    serve(books(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed)).tolist()
    assert titles(iter_gutenberg(streaming=False, seed=seed)) == [f"Title {i}" for i in order]


@pytest.mark.parametrize("streaming", [True, False])
def test_other_seeds_other_orders(serve, streaming):
    serve(books(30))
    orders = {tuple(titles(iter_gutenberg(seed=seed, streaming=streaming))) for seed in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == sorted(f"Title {i}" for i in range(30)) for order in orders)


@pytest.mark.parametrize("streaming", [True, False])
def test_without_shuffle_the_order_of_the_rows(serve, streaming):
    hub = serve(books(30))
    assert titles(iter_gutenberg(shuffle=False, streaming=streaming)) == [f"Title {i}" for i in range(30)]
    assert hub.shuffles == []


@given(n=st.integers(1, 25), take=st.integers(0, 30), streaming=st.booleans(), shuffle=st.booleans())
@settings(max_examples=40)
def test_take_is_the_beginning(n, take, streaming, shuffle):
    with pytest.MonkeyPatch.context() as patch:
        RowHub(books(n)).install(patch)
        options = {"streaming": streaming, "shuffle": shuffle, "shuffle_buffer_size": 4}
        everything = list(iter_gutenberg(**options))
        assert len(everything) == n
        assert list(iter_gutenberg(**options, take=take)) == everything[:take]


@pytest.mark.parametrize("take", [-1, -7])
def test_a_negative_take_is_refused(serve, take):
    hub = serve(books(3))
    with pytest.raises(ValueError, match=str(take)):
        list(iter_gutenberg(take=take))
    assert hub.calls == []


def test_take_0_opens_nothing(serve):
    hub = serve(books(3))
    assert list(iter_gutenberg(take=0)) == []
    assert hub.calls == []


@pytest.mark.parametrize("take", [1, 10])
def test_take_pulls_no_more_rows_than_it_needs(serve, take):
    hub = serve(books(50))
    assert len(list(iter_gutenberg(take=take, shuffle=False))) == take
    assert hub.pulled == take


@pytest.mark.parametrize(("take", "buffer_size"), [(1, 1), (1, 20), (3, 20), (30, 10)])
def test_take_pulls_no_more_rows_than_it_needs_and_the_buffer(serve, take, buffer_size):
    hub = serve(books(100))
    assert len(list(iter_gutenberg(take=take, shuffle_buffer_size=buffer_size))) == take
    assert take <= hub.pulled <= take + buffer_size


@pytest.mark.parametrize("streaming", [True, False])
def test_no_global_generator_moves(serve, random_states, streaming):
    serve(books(30))
    before = random_states()
    assert len(list(iter_gutenberg(streaming=streaming, shuffle_buffer_size=4))) == 30
    assert random_states() == before


# --- rows that are none ------------------------------------------------------------------------------


def left_out(caplog):
    return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]


def test_bad_rows_are_left_out_counted_and_said_once(serve, caplog):
    serve(
        [{"text": "a"}, {"text": ""}, {"text": None}, {"text": 5}, {"text": "\ud83d"}, {"text": "\r\n "}, {"text": "b"}]
    )
    stats = {}
    with caplog.at_level(logging.INFO):
        assert [sample.text for sample in iter_gutenberg(shuffle=False, stats=stats)] == ["a", "b"]
    assert stats == {"empty": 2, "without text": 2, "not utf-8": 1}
    (message,) = left_out(caplog)
    for part in ("gutenberg", "5", "2 empty", "2 without text", "1 not utf-8"):
        assert part in message


def test_it_is_also_said_when_the_iterator_is_closed_early(serve, caplog):
    serve([{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": ""}])
    stats = {}
    samples = iter_gutenberg(shuffle=False, stats=stats)
    assert [next(samples).text, next(samples).text] == ["a", "b"]
    samples.close()
    assert stats == {"empty": 1}
    assert len(left_out(caplog)) == 1


def test_an_iterator_that_was_never_started_says_nothing(serve, caplog):
    hub = serve([{"text": ""}])
    iter_gutenberg(shuffle=False).close()
    assert hub.pulled == 0
    assert left_out(caplog) == []


@pytest.mark.parametrize("streaming", [True, False])
def test_the_rows_themselves_are_left_alone(serve, streaming):
    rows = books(4)
    before = copy.deepcopy(rows)
    serve(rows)
    for sample in iter_gutenberg(streaming=streaming):
        sample.meta.clear()
    assert rows == before
    assert len(titles(iter_gutenberg(streaming=streaming))) == 4


# --- local files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("place", ["file", "folder", "last part", "full id"])
def test_local_rows(tmp_path, monkeypatch, no_rest, suffix, streaming, place):
    folder = tmp_path / (ID if place == "full id" else "gutenberg_clean_en_splits")
    folder.mkdir(parents=True)
    for split, n in (("train", 7), ("validation", 2)):
        write_rows(folder / f"{split}-00000-of-00001.{suffix}", books(n))
    path = {"file": folder / f"train-00000-of-00001.{suffix}", "folder": folder}.get(place)
    if path is None:
        monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    wanted = [
        PretrainSample(f"Book {i}\n\nChapter 1\n", "gutenberg", {"id": i, "title": f"Title {i}"}) for i in range(7)
    ]
    assert list(iter_gutenberg(path=path, streaming=streaming, shuffle=False)) == wanted
    mixed = list(iter_gutenberg(path=path, streaming=streaming))
    assert sorted(mixed, key=lambda sample: sample.meta["id"]) == wanted
    if place != "file":
        assert list(iter_gutenberg(path=path, streaming=streaming, shuffle=False, split="validation")) == wanted[:2]


def test_the_raw_books_have_a_place_of_their_own(tmp_path, monkeypatch):
    for name in ("gutenberg_clean_en_splits", "project_gutenberg"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "train.jsonl", [{"text": f"of {name}"}])
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    assert [sample.text for sample in iter_gutenberg()] == ["of gutenberg_clean_en_splits"]
    assert [sample.text for sample in iter_gutenberg(dataset_id=RAW)] == ["of project_gutenberg"]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_raw_books_have_a_split_per_language(tmp_path, no_rest, streaming):
    # As the Hub keeps them: data/en-00000-of-00052.parquet, data/de-00000-of-00005.parquet, ...
    (tmp_path / "data").mkdir()
    for language in ("de", "en"):
        for i in range(2):
            file = tmp_path / "data" / f"{language}-0000{i}-of-00002.parquet"
            write_rows(file, [{"id": f"{language} {i}", "text": f"{language} {i}"}])
    for language in ("de", "en"):
        samples = iter_gutenberg(dataset_id=RAW, path=tmp_path, split=language, streaming=streaming, shuffle=False)
        assert [sample.text for sample in samples] == [f"{language} 0", f"{language} 1"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_text_file_is_a_book(tmp_path, streaming):
    (tmp_path / "shelf").mkdir()
    (tmp_path / "b.txt").write_text("\ufeffTitle\n\nChapter 1\n\n  It was é.\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("One line", encoding="utf-8")
    (tmp_path / "shelf" / "c.txt").write_text("Third\n", encoding="utf-8")
    (tmp_path / "nothing.txt").write_text("\n\n", encoding="utf-8")
    stats = {}
    samples = list(iter_gutenberg(path=tmp_path, streaming=streaming, shuffle=False, stats=stats))
    assert [sample.text for sample in samples] == ["One line", "\ufeffTitle\n\nChapter 1\n\n  It was é.\n", "Third\n"]
    assert {sample.source for sample in samples} == {"gutenberg"}
    assert stats == {"empty": 1}
    (single,) = iter_gutenberg(path=tmp_path / "a.txt", streaming=streaming)
    assert single == PretrainSample("One line", "gutenberg", {})


@pytest.mark.parametrize("streaming", [True, False])
def test_a_shelf_of_books_in_any_order(tmp_path, streaming):
    wanted = [f"Book {i}\nwith a second line\n" for i in range(12)]
    for i, text in enumerate(wanted):
        (tmp_path / f"book-{i:02}.txt").write_text(text, encoding="utf-8")
    orders = {tuple(s.text for s in iter_gutenberg(path=tmp_path, streaming=streaming, seed=seed)) for seed in range(4)}
    assert all(sorted(order) == sorted(wanted) for order in orders)
    assert len(orders) == 4


@pytest.mark.parametrize("streaming", [True, False])
def test_a_book_of_10_mb(tmp_path, streaming):
    book = "A line of the book, not too long.\n" * 310_000
    assert len(book) > 10 * 2**20
    (tmp_path / "long.txt").write_text(book, encoding="utf-8")
    (sample,) = iter_gutenberg(path=tmp_path, streaming=streaming)
    assert sample.text == book


def test_a_book_whose_title_begins_like_a_split(tmp_path):
    (tmp_path / "Val d'Arno.txt").write_text("by Ruskin", encoding="utf-8")
    (tmp_path / "Alice.txt").write_text("by Carroll", encoding="utf-8")
    assert [sample.text for sample in iter_gutenberg(path=tmp_path, shuffle=False)] == ["by Carroll", "by Ruskin"]


def test_a_folder_without_books(tmp_path):
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        list(iter_gutenberg(path=tmp_path))
    assert str(tmp_path) in str(caught.value)
