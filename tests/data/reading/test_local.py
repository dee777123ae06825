"""Local files of a Hub dataset: NIELS_GPT_DATA, splits, configs and formats."""

import os
from pathlib import Path

import pytest

from niels_gpt.data.reading.local import (
    builder,
    choose_split,
    find_files,
    find_local,
    suffix,
)

ID = "HuggingFaceFW/fineweb-edu"


def touch(root, *names):
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x", encoding="utf-8")


def relative(found, root):
    return {split: [Path(file).relative_to(root).as_posix() for file in files] for split, files in found.items()}


# --- paths -------------------------------------------------------------------------------------------


def test_without_a_path_and_a_variable(monkeypatch):
    assert find_local(ID) is None
    monkeypatch.setenv("NIELS_GPT_DATA", "")
    assert find_local("wikitext", None) is None


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "texts/rows.jsonl")
    assert find_local(ID, "~/texts") == tmp_path / "texts"
    monkeypatch.setenv("NIELS_GPT_DATA", "~/texts")
    assert find_local("rows.jsonl") == tmp_path / "texts" / "rows.jsonl"


def test_a_missing_path_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError) as caught:
        find_local(ID, tmp_path / "nowhere")
    for part in (ID, str(tmp_path / "nowhere")):
        assert part in str(caught.value)
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=rf"NIELS_GPT_DATA.*{tmp_path}/nowhere"):
        find_local(ID)


def test_a_path_takes_precedence_over_the_variable(tmp_path, monkeypatch):
    touch(tmp_path, "all/fineweb-edu/a.jsonl", "mine/a.jsonl")
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "all"))
    for path in (tmp_path / "mine", tmp_path / "mine" / "a.jsonl"):
        assert find_local(ID, path) == find_local(ID, str(path)) == path
    assert find_local(ID) == find_local("fineweb-edu") == tmp_path / "all" / "fineweb-edu"
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "nowhere"))
    assert find_local(ID, tmp_path / "mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (["HuggingFaceFW/fineweb-edu/a.jsonl"], "HuggingFaceFW/fineweb-edu"),
        (["fineweb-edu/a.jsonl"], "fineweb-edu"),
        (["fineweb-edu/a.jsonl", "HuggingFaceFW/fineweb-edu/a.jsonl"], "HuggingFaceFW/fineweb-edu"),
        (["HuggingFaceFW/fineweb/a.jsonl", "fineweb/a.jsonl", "wikitext/a.jsonl"], None),
        (["HuggingFaceFW/a.jsonl"], None),
    ],
)
def test_the_variable_names_a_folder(tmp_path, monkeypatch, there, wanted):
    touch(tmp_path, *there)
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    assert find_local(ID) == (None if wanted is None else tmp_path / wanted)


@pytest.fixture
def use_map(tmp_path, monkeypatch):
    """Return a function that writes the YAML file of NIELS_GPT_DATA."""

    def write(content):
        file = tmp_path / "maps" / "data.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        monkeypatch.setenv("NIELS_GPT_DATA", str(file))
        return file

    return write


def test_a_map_with_relative_and_absolute_paths(tmp_path, use_map, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "maps/near/a.jsonl", "far/a.jsonl", "one.parquet")
    use_map(
        f"# paths\n{ID}: near\nwikitext: {tmp_path / 'far'}\n"
        f"gutenberg_clean_en_splits: ~/far/a.jsonl\n'manu/project_gutenberg': \"../one.parquet\"\n"
    )
    monkeypatch.chdir(tmp_path / "far")  # paths are relative to the map
    assert find_local(ID) == tmp_path / "maps" / "near"
    assert find_local("wikitext") == tmp_path / "far"
    assert find_local("nikolina-p/gutenberg_clean_en_splits") == tmp_path / "far" / "a.jsonl"
    assert find_local("manu/project_gutenberg").resolve() == tmp_path / "one.parquet"
    assert find_local("OpenAssistant/oasst1") is None


def test_the_full_id_takes_precedence_over_its_last_part(tmp_path, use_map):
    touch(tmp_path, "maps/a/x.jsonl", "maps/b/x.jsonl")
    use_map(f"fineweb-edu: a\n{ID}: b\n")
    assert find_local(ID) == tmp_path / "maps" / "b"
    assert find_local("another/fineweb-edu") == tmp_path / "maps" / "a"


def test_a_missing_path_in_a_map_is_named(use_map):
    file = use_map(f"{ID}: nowhere\nwikitext: also-nowhere\n")
    with pytest.raises(ValueError) as caught:
        find_local(ID)
    for part in (ID, str(file), "nowhere"):
        assert part in str(caught.value)
    assert find_local("OpenAssistant/oasst1") is None  # other entries are not checked


@pytest.mark.parametrize("content", ["a: [b", "- a\n- b\n", f"{ID}: 5\n", b"caf\xe9: b\n"])
def test_an_invalid_map(use_map, content):
    file = use_map(content)
    with pytest.raises(ValueError) as caught:
        find_local(ID)
    for part in ("NIELS_GPT_DATA", str(file), "YAML"):
        assert part in str(caught.value)


# --- which file belongs to which split ---------------------------------------------------------------


SPLIT_OF = {
    "train": "train.jsonl train-00000-of-00002.parquet train_1.jsonl.gz Train.txt rows.jsonl 0000.parquet "
    "data/part-1.parquet testament.txt valley.txt devices.jsonl values/a.jsonl my-test.jsonl été.txt",
    "validation": "validation-00000-of-00001.parquet VALIDATION.jsonl valid.jsonl val.txt val_3.jsonl dev.jsonl.gz "
    "validation/part.parquet val/0000.parquet train/dev/0.jsonl",
    "test": "test.json test.00.jsonl data/test/0000.parquet test/more/0000.parquet train/test.jsonl",
}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *((name, split) for split, names in SPLIT_OF.items() for name in names.split()),
        *((f"{title}.txt", "train") for title in ("Val d'Arno", "Test of Time", "Train to Nowhere", "Dev the Fox")),
    ],
)
def test_the_split_of_a_file_in_a_folder(tmp_path, name, split):
    touch(tmp_path, name)
    assert relative(find_files(tmp_path), tmp_path) == {split: [name]}


def test_files_of_each_split_are_sorted(tmp_path):
    shards = [f"train-{i:05}-of-00012.parquet" for i in range(12)]
    touch(tmp_path, *reversed(shards), "test/b.parquet", "test/a.parquet", "validation-00000-of-00001.parquet")
    assert relative(find_files(tmp_path, "CC-MAIN-2024-10"), tmp_path) == {
        "train": shards,
        "validation": ["validation-00000-of-00001.parquet"],
        "test": ["test/a.parquet", "test/b.parquet"],
    }


def test_hidden_and_other_files_are_skipped(tmp_path):
    touch(tmp_path, "train.jsonl", ".train.jsonl", ".cache/train.jsonl", "a/.git/test.jsonl", "README.md", "train.lock")
    touch(tmp_path, "LICENSE", "train.jsonl.sha256", "train.csv", "a/.test.jsonl", "notes.gz", "train.jsonl~")
    assert relative(find_files(tmp_path), tmp_path) == {"train": ["train.jsonl"]}


def test_a_hidden_folder_can_be_named(tmp_path):
    touch(tmp_path, ".data/train.jsonl")
    assert relative(find_files(tmp_path / ".data"), tmp_path) == {"train": [".data/train.jsonl"]}


def test_links_to_files_are_files(tmp_path):
    touch(tmp_path, "blobs/0123")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "train.parquet").symlink_to(tmp_path / "blobs" / "0123")
    assert relative(find_files(tmp_path / "snapshot"), tmp_path) == {"train": ["snapshot/train.parquet"]}


def test_parent_folders_do_not_name_a_split(tmp_path):
    touch(tmp_path, "test/books/a.txt")
    assert relative(find_files(tmp_path / "test" / "books"), tmp_path) == {"train": ["test/books/a.txt"]}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ("one", {"train": ["one/train.parquet"], "test": ["one/test.parquet"]}),
        ("three", {"train": ["data/three/train.parquet"]}),
        ("test-4", {"train": ["test-4/rows.parquet"]}),  # begins like a split
    ],
)
def test_a_folder_per_config(tmp_path, config, wanted):
    touch(tmp_path, "one/train.parquet", "one/test.parquet", "data/three/train.parquet", "data/one/x.parquet")
    touch(tmp_path, "test-4/rows.parquet")
    assert relative(find_files(tmp_path, config), tmp_path) == wanted


@pytest.mark.parametrize("above", ["", "data/"])
def test_other_configs_are_not_used(tmp_path, above):
    touch(tmp_path, "README.md", f"{above}wikitext-2-raw-v1/train.parquet", f"{above}wikitext-2-v1/train.parquet")
    with pytest.raises(ValueError) as caught:
        find_files(tmp_path, "wikitext-103-raw-v1")
    for part in (str(tmp_path), "wikitext-103-raw-v1", "wikitext-2-raw-v1", "wikitext-2-v1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["train/a.jsonl", "data/a.jsonl", "data/train/a.jsonl", "validation/more/a.jsonl"])
def test_folders_that_are_not_configs(tmp_path, name):
    touch(tmp_path, name, ".cache/x/train.jsonl")
    assert list(relative(find_files(tmp_path, "some-config"), tmp_path).values()) == [[name]]


@pytest.mark.parametrize("name", ["notes.txt", "val-1.parquet", "en-00000-of-00002.jsonl"])
def test_a_single_file_serves_any_split(tmp_path, name):
    touch(tmp_path, name, "another.jsonl")
    assert find_files(tmp_path / name) == {"": [str(tmp_path / name)]}
    assert find_files(tmp_path / name, "some-config") == {"": [str(tmp_path / name)]}


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["a.txt", "b.jsonl.gz"], [".jsonl", ".txt"]),
        (["a.txt", "data/b.json", "c.parquet"], [".json", ".parquet", ".txt"]),
    ],
)
def test_mixed_formats_are_an_error(tmp_path, names, named):
    touch(tmp_path, *names)
    with pytest.raises(ValueError) as caught:
        find_files(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert all(part in str(caught.value) for part in named)


@pytest.mark.parametrize("names", [["a.jsonl", "b.jsonl.gz"], ["a.json", "b.jsonl"], ["a.txt", "b.txt.gz"]])
def test_compressed_and_plain_files_are_one_format(tmp_path, names):
    touch(tmp_path, *names)
    assert relative(find_files(tmp_path), tmp_path) == {"train": names}


@pytest.mark.parametrize("names", [[], ["a.csv", "b.arrow"], [".hidden.jsonl", "sub/x.md"]])
def test_a_folder_without_data(tmp_path, names):
    touch(tmp_path, *names)
    with pytest.raises(ValueError, match="data file") as caught:
        find_files(tmp_path)
    for part in (str(tmp_path), ".parquet", ".jsonl", ".jsonl.gz", ".txt"):
        assert part in str(caught.value)


def test_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl"):
        find_files(tmp_path / "pipe.jsonl")


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path, monkeypatch):
    touch(tmp_path, "train.jsonl", "test/secret.jsonl")
    scandir = os.scandir

    def refuse(folder):
        if Path(folder) == tmp_path / "test":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises((PermissionError, ValueError)) as caught:
        find_files(tmp_path)
    assert str(tmp_path / "test") in str(caught.value)


# --- splits and formats ------------------------------------------------------------------------------


def test_choose_split():
    files = {"train": ["a", "b"], "validation": ["c"]}
    assert choose_split(files, "train", Path("here")) == ["a", "b"]
    assert choose_split(files, "validation", Path("here")) == ["c"]
    assert choose_split({"": ["a"]}, "en", Path("here")) == ["a"]  # a single file serves any split


@pytest.mark.parametrize("split", ["test", "", "Train"])
def test_an_unknown_split_names_the_known_ones(split):
    with pytest.raises(ValueError) as caught:
        choose_split({"validation": ["c"], "train": ["a"]}, split, Path("some") / "where")
    for part in (str(Path("some") / "where"), repr(split), "train, validation"):
        assert part in str(caught.value)


def test_builder():
    names = {"parquet": ["a.parquet"], "json": ["a.jsonl", "a.jsonl.gz", "a.json"], "text": ["a.txt", "a.b.txt.gz"]}
    for kind, files in names.items():
        assert [builder([f"/folder.csv/{name}", "whatever"]) for name in files] == [kind] * len(files)


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "jsonl", "a.jsonl.zst"])
def test_builder_of_an_unknown_format(name):
    with pytest.raises(ValueError) as caught:
        builder([f"/folder/{name}"])
    for part in (f"/folder/{name}", ".parquet", ".jsonl", ".jsonl.gz", ".txt"):
        assert part in str(caught.value)


def test_suffix():
    names = {".jsonl": ["x.jsonl", "x.jsonl.gz"], ".txt": ["x.y.txt", "f.gz/x.txt"], "": ["x.gz", "x", "f.txt/x"]}
    for wanted, paths in names.items():
        assert [suffix(Path(path)) for path in paths] == [wanted] * len(paths)
