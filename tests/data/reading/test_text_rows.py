"""Samples from rows with a text: which field, which rows are dropped, and which are an error."""

import logging

import datasets
import pytest

from niels_gpt.data.reading.hub import HubRequest, Shuffle
from niels_gpt.data.reading.text_rows import TEXTLESS_ROWS, check_take, iter_text_samples, select_text_field, text_key
from niels_gpt.data.types import PretrainSample
from tests.data import RowHub, dropped_lines

REQUEST = HubRequest("some/id", streaming=True)


@pytest.fixture
def serve(monkeypatch):
    """Return a function that installs a fake Hub with these rows."""
    return lambda rows: RowHub(rows).install(monkeypatch)


def texts(**options):
    return [sample.text for sample in iter_text_samples(REQUEST, source="pages", **options)]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"url": "u", "text": "t"}, "text"),
        ({"text": "", "content": "c"}, "text"),  # an empty string is a text
        ({"text": None, "content": "c"}, "content"),
        ({"text": 5, "id": 1, "content": "c", "more": "m"}, "content"),
        ({"n": 1, "b": "second", "a": "third"}, "b"),
    ],
)
def test_the_field_of_the_text(row, key):
    assert text_key(row) == key
    assert select_text_field(row) == row[key]


def test_a_row_without_text_names_its_keys():
    for row in ({"score": 1, "labels": ["a"]}, {"score": None, "labels": b"bytes"}):
        with pytest.raises(ValueError, match=r"score, labels"):
            select_text_field(row)


BAD_ROWS = [
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
DROPPED = {"empty": 3, "without text": 6, "not utf-8": 2}


def test_dropped_rows_by_reason(serve, caplog):
    caplog.set_level(logging.INFO)
    serve(BAD_ROWS)
    stats = {}
    assert texts(stats=stats) == KEPT
    assert stats == DROPPED
    (line,) = dropped_lines(caplog)
    for fact in ("pages", "11 rows", "3 empty", "6 without text", "2 not utf-8"):
        assert fact in line
    shuffled = {}
    assert sorted(texts(stats=shuffled, shuffle=Shuffle(5))) == sorted(KEPT)
    assert shuffled == DROPPED


def test_dropped_rows_are_logged_when_reading_fails(caplog, monkeypatch):
    def generate():
        yield {"text": "a"}
        yield {"text": ""}
        raise KeyError("a bug in the stream")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(generate))
    stats = {}
    with pytest.raises(ValueError, match="a bug in the stream"):
        texts(stats=stats)
    assert stats == {"empty": 1}
    assert len(dropped_lines(caplog)) == 1


def test_meta_has_the_other_fields(serve):
    rows = [{"score": 2, "content": "the content", "tags": ["x"], "more": {"k": 1}, "none": None}]
    serve(rows)
    (sample,) = iter_text_samples(REQUEST, source="pages")
    assert sample == PretrainSample("the content", "pages", {"score": 2, "tags": ["x"], "more": {"k": 1}, "none": None})
    sample.meta.clear()
    assert rows[0]["score"] == 2  # the row is not changed


@pytest.mark.parametrize("number", [1, TEXTLESS_ROWS - 1])
def test_a_dataset_without_text_is_an_error_with_the_keys(serve, number):
    serve([{"score": 1, "labels": [1]}] * number)
    stats = {}
    with pytest.raises(ValueError, match="score, labels"):
        texts(stats=stats)
    assert stats == {"without text": number}


def test_the_error_comes_after_the_first_textless_rows(serve):
    hub = serve([{"score": 1}] * (TEXTLESS_ROWS + 50))
    stats = {}
    with pytest.raises(ValueError, match="score"):
        texts(stats=stats)
    assert hub.pulled == TEXTLESS_ROWS == 100
    assert stats == {"without text": TEXTLESS_ROWS - 1}


def test_textless_rows_before_a_text_are_only_dropped(serve):
    stats = {}
    serve([{"score": 1}] * (TEXTLESS_ROWS - 1) + [{"text": "late"}] + [{"score": 1}] * 150)
    assert texts(stats=stats) == ["late"]
    assert stats == {"without text": TEXTLESS_ROWS + 149}


@pytest.mark.parametrize("first", [{"text": None}, {"text": 5}, {}])
def test_a_null_text_is_no_other_dataset(serve, first):
    stats = {}
    serve([first] * (TEXTLESS_ROWS + 1))
    assert texts(stats=stats) == []
    assert stats == {"without text": TEXTLESS_ROWS + 1}


def test_take(serve):
    hub = serve([{"text": ""}, {"text": "a"}, {"text": " "}, {"text": "b"}, {"text": "c"}, {"text": "d"}])
    assert texts(take=2) == ["a", "b"]
    assert hub.pulled == 4
    assert texts(take=0) == []
    assert len(hub.calls) == 1  # take=0 opens nothing


@pytest.mark.parametrize("take", [-1, 1.0, "3"])
def test_an_invalid_take(take):
    with pytest.raises(ValueError, match=rf"take_trees.*{take}"):
        check_take(take, "take_trees")
