"""wikitext: its splits, `load_wikitext`, and local files."""

import inspect
import json
import logging

import pytest

from niels_gpt.data.types import PretrainSample
from niels_gpt.data.wikitext import iter_wikitext, load_wikitext
from tests.data import dropped_lines, write_rows

ROWS = {
    "train": ["", " = Title = \n", " \n", "First paragraph , é . \n", None, "\t", "Second", "\u3000\n", "0"],
    "validation": ["held out\r\n", "", "more"],
    "test": [" ", "test row"],
}
KEPT = {
    "train": [" = Title = \n", "First paragraph , é . \n", "Second", "0"],
    "val": ["held out\r\n", "more"],
    "test": ["test row"],
}


def write_texts(path, texts):
    write_rows(path, [{"text": text} for text in texts])


def assert_real_lists(found, wanted):
    assert found == wanted
    assert all(type(texts) is list and all(type(text) is str for text in texts) for texts in found.values())


def test_splits_of_the_hub_without_blank_rows(hub):
    hub.rows = ROWS
    assert_real_lists(load_wikitext(), KEPT)
    assert set(hub.calls) == {("wikitext", "wikitext-103-raw-v1")}


def test_local_folder(tmp_path):
    for split, rows in ROWS.items():
        write_texts(tmp_path / f"{split}.parquet", rows)
    assert_real_lists(load_wikitext(path=tmp_path), KEPT)
    assert load_wikitext(path=str(tmp_path)) == KEPT


def test_local_text_files_have_a_row_per_line(tmp_path):
    (tmp_path / "train.txt").write_text("one\n\n  \ntwo é\n", encoding="utf-8")
    (tmp_path / "validation.txt").write_text("three", encoding="utf-8")
    assert_real_lists(load_wikitext(path=tmp_path), {"train": ["one", "two é"], "val": ["three"], "test": []})


@pytest.mark.parametrize(("there", "missing"), [("train", "validation"), ("validation", "train")])
def test_a_split_without_file_is_named(tmp_path, there, missing):
    write_texts(tmp_path / f"{there}.jsonl", ["a"])
    with pytest.raises(ValueError, match=missing) as caught:
        load_wikitext(path=tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("hub_split", ["train", "test"])
def test_the_split_without_a_text_column_is_named(tmp_path, hub_split):
    for split in ROWS:
        row = {"body": "a"} if split == hub_split else {"text": "a"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"column text.*body") as caught:
        load_wikitext(path=tmp_path)
    assert str(tmp_path / f"{hub_split}.jsonl") in str(caught.value)


@pytest.mark.parametrize("odd", [1, ["a"]])
def test_text_that_is_not_a_string_is_dropped_and_counted(tmp_path, odd):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": odd}) + "\n", encoding="utf-8")
    write_texts(tmp_path / "validation.jsonl", ["b", None])
    stats = {}
    assert load_wikitext(path=tmp_path, stats=stats) == {"train": [], "val": ["b"], "test": []}
    assert stats == {"without text": 2}


def test_splits_may_have_different_columns(tmp_path):
    write_texts(tmp_path / "train.jsonl", ["a"])
    (tmp_path / "validation.jsonl").write_text('{"number": 1, "text": "b"}\n', encoding="utf-8")
    assert load_wikitext(path=tmp_path) == {"train": ["a"], "val": ["b"], "test": []}


def test_dropped_rows_of_all_splits_are_logged_once(hub, caplog):
    hub.rows = ROWS
    stats = {"empty": 1}
    with caplog.at_level(logging.INFO):
        assert load_wikitext(stats=stats) == KEPT
    assert stats == {"empty": 7, "without text": 1}
    (message,) = dropped_lines(caplog)
    for part in ("wikitext", "7 rows", "6 empty", "1 without text"):
        assert part in message


def test_a_folder_per_config(tmp_path):
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        (tmp_path / config).mkdir()
        for split in ROWS:
            write_texts(tmp_path / config / f"{split}-00000-of-00001.parquet", [f"{split} of {config}"])
    assert load_wikitext(path=tmp_path)["val"] == ["validation of wikitext-103-raw-v1"]
    assert load_wikitext(path=tmp_path, config="wikitext-2-raw-v1")["train"] == ["train of wikitext-2-raw-v1"]


def texts(samples):
    return [sample.text for sample in samples]


def test_the_signature():
    parameters = inspect.signature(iter_wikitext).parameters
    wanted = {"config": "wikitext-103-raw-v1", "split": "train", "take": None}
    assert {name: parameters[name].default for name in wanted} == wanted
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())


@pytest.mark.parametrize(
    ("split", "wanted"), [("train", "train"), ("val", "val"), ("validation", "val"), ("test", "test")]
)
def test_lines_of_a_split_without_blank_ones(hub, split, wanted):
    hub.rows = ROWS
    assert list(iter_wikitext(split=split)) == [PretrainSample(text, "wikitext", {}) for text in KEPT[wanted]]
    assert hub.calls == [("wikitext", "wikitext-103-raw-v1")]


def test_lines_of_another_config(hub):
    hub.rows = ROWS
    assert texts(iter_wikitext(config="wikitext-2-raw-v1")) == KEPT["train"]
    assert hub.calls == [("wikitext", "wikitext-2-raw-v1")]
