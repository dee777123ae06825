"""Local files of a Hub dataset: NIELS_GPT_DATA, splits, configs and formats."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_no_local_path():
    assert find_local(ID) is None
    assert find_local("wikitext", None) is None


@pytest.mark.parametrize("as_text", [True, False])
def test_an_existing_path(tmp_path, as_text):
    file = tmp_path / "rows.jsonl"
    touch(tmp_path, "rows.jsonl")
    for path in (tmp_path, file):
        assert find_local(ID, str(path) if as_text else path) == path


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "texts/rows.jsonl")
    assert find_local(ID, "~/texts") == tmp_path / "texts"
    monkeypatch.setenv("NIELS_GPT_DATA", "~/texts")
    assert find_local("rows.jsonl") == tmp_path / "texts" / "rows.jsonl"


def test_a_missing_path_is_named_with_the_dataset(tmp_path):
    with pytest.raises(ValueError) as caught:
        find_local(ID, tmp_path / "nowhere")
    for part in (ID, str(tmp_path / "nowhere")):
        assert part in str(caught.value)


def test_a_path_takes_precedence_over_the_variable(tmp_path, monkeypatch):
    touch(tmp_path, "all/fineweb-edu/a.jsonl", "mine/a.jsonl")
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "all"))
    assert find_local(ID, tmp_path / "mine") == tmp_path / "mine"
    assert find_local(ID) == tmp_path / "all" / "fineweb-edu"
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


def test_an_id_without_an_owner(tmp_path, monkeypatch):
    touch(tmp_path, "wikitext/train.jsonl")
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    assert find_local("wikitext") == find_local("Salesforce/wikitext") == tmp_path / "wikitext"


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DATA", "")
    assert find_local(ID) is None


def test_a_variable_with_a_missing_path(tmp_path, monkeypatch):
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError) as caught:
        find_local(ID)
    assert "NIELS_GPT_DATA" in str(caught.value) and str(tmp_path / "nowhere") in str(caught.value)


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
    touch(tmp_path, "maps/near/a.jsonl", "far/a.jsonl", "one.parquet")
    use_map(
        f"# paths\n{ID}: near\nwikitext: {tmp_path / 'far'}\n"
        f"gutenberg_clean_en_splits: ../far/a.jsonl\n'manu/project_gutenberg': \"../one.parquet\"\n"
    )
    monkeypatch.chdir(tmp_path / "far")  # paths are relative to the map
    assert find_local(ID) == tmp_path / "maps" / "near"
    assert find_local("wikitext") == tmp_path / "far"
    assert find_local("nikolina-p/gutenberg_clean_en_splits").resolve() == tmp_path / "far" / "a.jsonl"
    assert find_local("manu/project_gutenberg").resolve() == tmp_path / "one.parquet"
    assert find_local("OpenAssistant/oasst1") is None


def test_the_full_id_takes_precedence_over_its_last_part(tmp_path, use_map):
    touch(tmp_path, "maps/a/x.jsonl", "maps/b/x.jsonl")
    use_map(f"fineweb-edu: a\n{ID}: b\n")
    assert find_local(ID) == tmp_path / "maps" / "b"
    assert find_local("another/fineweb-edu") == tmp_path / "maps" / "a"


def test_a_map_into_the_home_folder(tmp_path, use_map, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "texts/a.jsonl")
    use_map(f"{ID}: ~/texts\n")
    assert find_local(ID) == tmp_path / "texts"


def test_a_missing_path_in_a_map_is_named(use_map):
    file = use_map(f"{ID}: nowhere\nwikitext: also-nowhere\n")
    with pytest.raises(ValueError) as caught:
        find_local(ID)
    for part in (ID, str(file), "nowhere"):
        assert part in str(caught.value)
    assert find_local("OpenAssistant/oasst1") is None  # other entries are not checked


@pytest.mark.parametrize(
    "content",
    [
        "a: [b",
        "- a\n- b\n",
        "",
        f"{ID}:\n",
        f"{ID}: 5\n",
        f"{ID}: [a, b]\n",
        f"{ID}: {{path: a}}\n",
        b"caf\xe9: b\n",
    ],
)
def test_an_invalid_map(use_map, content):
    file = use_map(content)
    with pytest.raises(ValueError) as caught:
        find_local(ID)
    for part in ("NIELS_GPT_DATA", str(file), "YAML"):
        assert part in str(caught.value)


# --- which file belongs to which split ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("train_1.jsonl.gz", "train"),
        ("Train.txt", "train"),
        ("validation.jsonl", "validation"),
        ("validation-00000-of-00001.parquet", "validation"),
        ("VALIDATION.jsonl", "validation"),
        ("valid.jsonl", "validation"),
        ("val.txt", "validation"),
        ("val_3.jsonl", "validation"),
        ("dev.jsonl.gz", "validation"),
        ("test.json", "test"),
        ("test.00.jsonl", "test"),
        ("validation/part.parquet", "validation"),
        ("val/0000.parquet", "validation"),
        ("data/test/0000.parquet", "test"),
        ("test/more/0000.parquet", "test"),
        ("train/test.jsonl", "test"),
        ("train/dev/0.jsonl", "validation"),
        ("rows.jsonl", "train"),
        ("0000.parquet", "train"),
        ("data/part-1.parquet", "train"),
        ("testament.txt", "train"),
        ("valley.txt", "train"),
        ("devices.jsonl", "train"),
        ("values/a.jsonl", "train"),
        ("my-test.jsonl", "train"),
        ("été.txt", "train"),
    ],
)
def test_the_split_of_a_file_in_a_folder(tmp_path, name, split):
    touch(tmp_path, name)
    assert relative(find_files(tmp_path), tmp_path) == {split: [name]}


@pytest.mark.parametrize("title", ["Val d'Arno", "Test of Time", "Train to Nowhere", "Dev the Fox", "Valid Reasons"])
def test_a_book_title_is_not_a_split(tmp_path, title):
    touch(tmp_path, f"{title}.txt", "Alice.txt")
    assert relative(find_files(tmp_path), tmp_path) == {"train": sorted(["Alice.txt", f"{title}.txt"])}


def test_shards_are_sorted(tmp_path):
    shards = [f"train-{i:05}-of-00012.parquet" for i in range(12)]
    touch(tmp_path, *reversed(shards), "test-00001-of-00002.parquet", "test-00000-of-00002.parquet")
    assert relative(find_files(tmp_path), tmp_path) == {
        "train": shards,
        "test": ["test-00000-of-00002.parquet", "test-00001-of-00002.parquet"],
    }


def test_splits_by_folder_and_by_file(tmp_path):
    touch(tmp_path, "train/b.jsonl", "train/a.jsonl", "validation/a.jsonl", "test.jsonl.gz", "more.json")
    found = relative(find_files(tmp_path), tmp_path)
    assert {split: sorted(files) for split, files in found.items()} == {
        "train": ["more.json", "train/a.jsonl", "train/b.jsonl"],
        "validation": ["validation/a.jsonl"],
        "test": ["test.jsonl.gz"],
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


CONFIGS = [
    "one/train.parquet",
    "one/test.parquet",
    "two/train.parquet",
    "data/three/train.parquet",
    "data/one/x.parquet",
]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ("one", {"train": ["one/train.parquet"], "test": ["one/test.parquet"]}),
        ("two", {"train": ["two/train.parquet"]}),
        ("three", {"train": ["data/three/train.parquet"]}),
    ],
)
def test_a_folder_per_config(tmp_path, config, wanted):
    touch(tmp_path, *CONFIGS)
    assert relative(find_files(tmp_path, config), tmp_path) == wanted


@pytest.mark.parametrize("config", [None, "CC-MAIN-2024-10"])
def test_a_folder_without_configs(tmp_path, config):
    touch(tmp_path, "train.jsonl", "test.jsonl")
    assert relative(find_files(tmp_path, config), tmp_path) == {"train": ["train.jsonl"], "test": ["test.jsonl"]}


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


def test_a_config_whose_name_begins_like_a_split(tmp_path):
    touch(tmp_path, "test-config/rows.jsonl")
    assert relative(find_files(tmp_path, "test-config"), tmp_path) == {"train": ["test-config/rows.jsonl"]}


@pytest.mark.parametrize("name", ["rows.jsonl", "notes.txt", "train.jsonl", "val-1.parquet", "en-00000-of-00002.jsonl"])
def test_a_single_file_serves_any_split(tmp_path, name):
    touch(tmp_path, name, "another.jsonl")
    assert find_files(tmp_path / name) == {"": [str(tmp_path / name)]}
    assert find_files(tmp_path / name, "some-config") == {"": [str(tmp_path / name)]}


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["train.jsonl", "test.parquet"], [".jsonl", ".parquet"]),
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


@pytest.mark.parametrize("names", [[], ["README.md"], ["a.csv", "b.arrow"], [".hidden.jsonl"], ["sub/x.md"]])
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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root can read everything")
@pytest.mark.parametrize("closed", ["", "test"])
def test_a_folder_without_read_permission(tmp_path, closed):
    touch(tmp_path, "train.jsonl", "test/secret.jsonl")
    folder = tmp_path / closed
    folder.chmod(0)
    try:
        with pytest.raises((PermissionError, ValueError)) as caught:
            find_files(tmp_path)
        assert str(folder) in str(caught.value)
    finally:
        folder.chmod(stat.S_IRWXU)


@settings(max_examples=40)
@given(st.lists(st.text("abtrainvldes/.-_0", min_size=1, max_size=12), max_size=8, unique=True))
def test_every_data_file_is_in_exactly_one_split(tmp_path_factory, stems):
    root = tmp_path_factory.mktemp("files")
    wanted = set()
    for stem in stems:
        parts = [part for part in stem.split("/") if part.strip(".")]
        if parts:
            file = root.joinpath(*(f"d-{part}" for part in parts[:-1]), f"f-{parts[-1]}.jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            wanted.add(str(file))
    if not wanted:
        return
    found = [file for files in find_files(root).values() for file in files]
    assert sorted(found) == sorted(wanted)
    assert all(
        files == sorted(files) for files in find_files(root).values() if len({Path(f).parent for f in files}) == 1
    )


# --- splits and formats ------------------------------------------------------------------------------


def test_choose_split():
    files = {"train": ["a", "b"], "validation": ["c"]}
    assert choose_split(files, "train", Path("here")) == ["a", "b"]
    assert choose_split(files, "validation", Path("here")) == ["c"]


@pytest.mark.parametrize("split", ["train", "validation", "en", "anything"])
def test_a_file_without_a_split_serves_any(split):
    assert choose_split({"": ["a"]}, split, Path("here")) == ["a"]


@pytest.mark.parametrize("split", ["test", "", "Train", "nosuch"])
def test_an_unknown_split_names_the_known_ones(split):
    with pytest.raises(ValueError) as caught:
        choose_split({"validation": ["c"], "train": ["a"]}, split, Path("some") / "where")
    for part in (str(Path("some") / "where"), repr(split), "train, validation"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("a.jsonl", "json"),
        ("a.jsonl.gz", "json"),
        ("a.json", "json"),
        ("a.json.gz", "json"),
        ("a.txt", "text"),
        ("a.b.txt.gz", "text"),
    ],
)
def test_builder(name, kind):
    assert builder([f"/folder.csv/{name}", "whatever"]) == kind


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.md", "jsonl", "a.jsonl.zst"])
def test_builder_of_an_unknown_format(name):
    with pytest.raises(ValueError) as caught:
        builder([f"/folder/{name}"])
    for part in (f"/folder/{name}", ".parquet", ".jsonl", ".jsonl.gz", ".txt"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("x.jsonl", ".jsonl"),
        ("x.jsonl.gz", ".jsonl"),
        ("x.y.txt", ".txt"),
        ("train-00000-of-00001.parquet", ".parquet"),
        ("x.gz", ""),
        ("x", ""),
        ("folder.txt/x", ""),
        ("folder.gz/x.txt", ".txt"),
    ],
)
def test_suffix(name, wanted):
    assert suffix(Path(name)) == wanted
