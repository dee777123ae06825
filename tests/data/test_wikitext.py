import gzip
import json

import pytest

from niels_gpt.data.wikitext import load_wikitext, local_files

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


def write_jsonl(path, rows):
    data = "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())}), path)


def assert_real_lists(found, wanted):
    assert found == wanted
    assert all(type(texts) is list and all(type(text) is str for text in texts) for texts in found.values())


# --- the Hub -----------------------------------------------------------------------------------------


def test_hub_rows_under_our_names_without_blank_ones(hub):
    hub.rows = ROWS
    assert_real_lists(load_wikitext(), KEPT)
    assert set(hub.calls) == {("wikitext", "wikitext-103-raw-v1")}


def test_another_config(hub):
    hub.rows = ROWS
    load_wikitext(config="wikitext-2-raw-v1")
    assert set(hub.calls) == {("wikitext", "wikitext-2-raw-v1")}


def test_load_dataset_is_looked_up_when_it_runs(hub):
    hub.rows = ROWS
    load_wikitext()
    hub.rows = {**ROWS, "train": ["changed"]}
    assert load_wikitext()["train"] == ["changed"]


@pytest.mark.parametrize(
    "error", [ConnectionError("no route to the Hub"), FileNotFoundError("no such dataset"), OSError()]
)
def test_a_hub_out_of_reach_says_what_to_do(hub, error):
    hub.error = error
    with pytest.raises(ValueError) as caught:
        load_wikitext()
    for part in ("wikitext", "wikitext-103-raw-v1", "--wiki", str(error)):
        assert part in str(caught.value)


def test_no_network_is_asked_for_real():
    with pytest.raises(ValueError, match="wikitext-103-raw-v1"):
        load_wikitext()


# --- local files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_local_folder(tmp_path, suffix):
    write = write_parquet if suffix == "parquet" else write_jsonl
    for split, rows in ROWS.items():
        write(tmp_path / f"{split}.{suffix}", rows)
    (tmp_path / "README.md").write_text("not data", encoding="utf-8")
    assert_real_lists(load_wikitext(path=tmp_path), KEPT)
    assert load_wikitext(path=str(tmp_path)) == KEPT


def test_local_text_files_have_a_row_per_line(tmp_path):
    (tmp_path / "train.txt").write_text("one\n\n  \ntwo é\n", encoding="utf-8")
    (tmp_path / "validation.txt").write_text("three", encoding="utf-8")
    assert_real_lists(load_wikitext(path=tmp_path), {"train": ["one", "two é"], "val": ["three"], "test": []})


def test_shards_follow_each_other_by_name(tmp_path):
    for number in (2, 0, 1):
        write_parquet(tmp_path / f"train-0000{number}-of-00003.parquet", [f"row {number}"])
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", ["held out"])
    assert load_wikitext(path=tmp_path) == {"train": ["row 0", "row 1", "row 2"], "val": ["held out"], "test": []}


@pytest.mark.parametrize("name", ["validation.jsonl", "valid.jsonl", "val.jsonl", "val-00000-of-00001.jsonl"])
def test_names_of_the_validation_file(tmp_path, name):
    write_jsonl(tmp_path / "train.jsonl", ["a"])
    write_jsonl(tmp_path / name, ["b"])
    assert load_wikitext(path=tmp_path) == {"train": ["a"], "val": ["b"], "test": []}
    assert local_files(tmp_path) == {
        "train": [str(tmp_path / "train.jsonl")],
        "validation": [str(tmp_path / name)],
    }


def test_an_edited_file_is_read_anew(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["old"])
    write_jsonl(tmp_path / "validation.jsonl", ["b"])
    assert load_wikitext(path=tmp_path)["train"] == ["old"]
    write_jsonl(tmp_path / "train.jsonl", ["new", "er"])
    assert load_wikitext(path=tmp_path)["train"] == ["new", "er"]


@pytest.mark.parametrize(("there", "missing"), [("train", "validation"), ("validation", "train")])
def test_a_split_without_file_is_named(tmp_path, there, missing):
    write_jsonl(tmp_path / f"{there}.jsonl", ["a"])
    with pytest.raises(ValueError, match=f"has no {missing} file") as caught:
        load_wikitext(path=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_wikitext(path=tmp_path / "nowhere")


def test_mixed_kinds_are_refused(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ["a"])
    write_parquet(tmp_path / "validation.parquet", ["b"])
    with pytest.raises(ValueError, match="json and parquet"):
        load_wikitext(path=tmp_path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_broken_file_is_an_error_with_the_folder(tmp_path, suffix):
    write = write_parquet if suffix == "parquet" else write_jsonl
    write(tmp_path / f"validation.{suffix}", ["b"])
    (tmp_path / f"train.{suffix}").write_bytes(b'{"text": "cut sho')
    with pytest.raises(ValueError) as caught:
        load_wikitext(path=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_rows_without_text_are_an_error_with_the_column(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text('{"body": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="text"):
        load_wikitext(path=tmp_path)


def test_no_global_generator_moves(tmp_path, random_states):
    write_jsonl(tmp_path / "train.jsonl", ["a"])
    write_jsonl(tmp_path / "validation.jsonl", ["b"])
    before = random_states()
    load_wikitext(path=tmp_path)
    assert random_states() == before
