"""Notes: which files, their texts, and the split."""

import os
from pathlib import Path

import pytest
import torch

from niels_gpt.data.roam import iter_roam, list_roam_paths, load_texts, split_roam_paths
from niels_gpt.data.types import PretrainSample


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")


# --- list --------------------------------------------------------------------------------------------


def test_all_markdown_files_in_all_folders(tmp_path):
    make(
        tmp_path,
        "b.md",
        "a.md",
        "deep/er/c.md",
        "deep/d.md",
        ".hidden/e.md",
        "f.txt",
        "g.md.bak",
        "h.MD",
        "md",
        "i.markdown",
    )
    wanted = [".hidden/e.md", "a.md", "b.md", "deep/d.md", "deep/er/c.md"]
    assert list_roam_paths(str(tmp_path)) == [f"{tmp_path}/{name}" for name in wanted]


def test_sorted_as_strings_not_folder_by_folder(tmp_path):
    names = ["a/z.md", "a b/c.md", "a.md", "a-b.md", "a0.md", "A.md", "é.md", "a/b/c.md", "a/b.md", "Z/a.md"]
    make(tmp_path, *names)
    # By code points: " " < "-" < "." < "/" < "0" < upper < lower < "é".
    wanted = ["A.md", "Z/a.md", "a b/c.md", "a-b.md", "a.md", "a/b.md", "a/b/c.md", "a/z.md", "a0.md", "é.md"]
    assert list_roam_paths(str(tmp_path)) == [f"{tmp_path}/{name}" for name in wanted]


def test_only_regular_files(tmp_path):
    make(tmp_path, "note.md", "folder.md/inner.md")
    (tmp_path / "dangling.md").symlink_to(tmp_path / "nowhere.md")
    os.mkfifo(tmp_path / "pipe.md")
    found = list_roam_paths(str(tmp_path))
    assert found == [f"{tmp_path}/folder.md/inner.md", f"{tmp_path}/note.md"]


def test_paths_are_absolute_strings(tmp_path, monkeypatch):
    make(tmp_path, "notes/a.md")
    monkeypatch.chdir(tmp_path)
    for root in ("notes", "notes/", "./notes"):
        found = list_roam_paths(root)
        assert all(type(path) is str and Path(path).is_absolute() for path in found)
        assert [Path(path).samefile(tmp_path / "notes" / "a.md") for path in found] == [True]


def test_every_spelling_of_a_folder_gives_the_same_list(tmp_path, monkeypatch):
    make(tmp_path, "notes/a.md", "notes/b/c.md")
    monkeypatch.chdir(tmp_path)
    assert list_roam_paths("notes") == list_roam_paths("notes/") == list_roam_paths(str(tmp_path / "notes"))


def test_an_empty_folder_has_no_notes(tmp_path):
    assert list_roam_paths(str(tmp_path)) == []


def test_no_folder_is_an_error(tmp_path):
    make(tmp_path, "file.md")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_roam_paths(str(tmp_path / "nowhere"))
    with pytest.raises(NotADirectoryError, match=r"file\.md"):
        list_roam_paths(str(tmp_path / "file.md"))


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    make(tmp_path, "a.md", "private/b.md")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="private"):
        list_roam_paths(str(tmp_path))


# --- load --------------------------------------------------------------------------------------------


def test_every_character_is_kept_in_the_order_of_the_paths(tmp_path):
    contents = {
        "crlf.md": b"a\r\nb\rc\n",
        "bom.md": b"\xef\xbb\xbf# title\n",
        "empty.md": b"",
        "wide.md": "é€\U0001f600\x00\u2028".encode(),
        "ends.md": b"\n\n x \n\n",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    wanted = ["a\r\nb\rc\n", "\ufeff# title\n", "", "é€\U0001f600\x00\u2028", "\n\n x \n\n"]
    paths = [str(tmp_path / name) for name in contents]
    assert load_texts(paths) == wanted
    assert load_texts(paths[::-1]) == wanted[::-1]
    assert load_texts([]) == []
    assert [text.encode("utf-8") for text in load_texts(paths)] == list(contents.values())


@pytest.mark.parametrize(
    ("data", "offset", "replaced"),
    [
        (b"caf\xe9", 3, "caf\ufffd"),
        (b"\xff\xfea\x00", 0, "\ufffd\ufffda\x00"),
        ("é".encode() * 5 + b"\x80x", 10, "ééééé\ufffdx"),  # bytes are counted, not characters
        (b"cut short \xe2\x82", 10, "cut short \ufffd"),
        (b"surrogate \xed\xa0\x80", 10, "surrogate \ufffd\ufffd\ufffd"),
    ],
)
def test_a_file_that_is_not_utf8_is_named_with_the_byte_offset(tmp_path, data, offset, replaced):
    make(tmp_path, "good.md")
    bad = tmp_path / "bad note.md"
    bad.write_bytes(data)
    paths = [str(tmp_path / "good.md"), str(bad)]
    with pytest.raises(ValueError, match=rf"bad note\.md.*\b{offset}\b"):
        load_texts(paths)
    assert load_texts(paths, errors="replace") == ["text of good.md", replaced]


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        load_texts([str(tmp_path / "gone.md")])


# --- split -------------------------------------------------------------------------------------------


def test_split_is_by_file_and_seeded():
    paths = [f"/notes/{i}.md" for i in range(25)]
    generator = torch.Generator()
    generator.manual_seed(42)
    held_out = sorted(torch.randperm(25, generator=generator)[:5].tolist())
    train, val = split_roam_paths(paths, val_frac=0.2, seed=42)
    assert val == [paths[i] for i in held_out]
    assert train == [path for path in paths if path not in val]


def test_a_tenth_is_held_out_by_default():
    train, val = split_roam_paths([f"/notes/{i}.md" for i in range(30)], seed=0)
    assert (len(train), len(val)) == (27, 3)


# --- samples -----------------------------------------------------------------------------------------


def test_a_sample_per_note(tmp_path):
    make(tmp_path, "b.md", "a/z.md", "a.md", "é/ü.md", "other.txt")
    wanted = ["a.md", "a/z.md", "b.md", "é/ü.md"]
    for root in (tmp_path, str(tmp_path)):
        assert list(iter_roam(root)) == [PretrainSample(f"text of {name}", "roam", {"path": name}) for name in wanted]


def test_samples_come_in_the_order_of_the_paths_with_every_character(tmp_path):
    contents = {
        "z.md": "a\r\nb\rc\n",
        "a b/c.md": "\ufeff# title\n",
        "a/b.md": "\n\n x \n\n",
        "a-b.md": "é€\U0001f600\x00\u2028",
        "A.md": ".",
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    found = list(iter_roam(tmp_path))
    assert [sample.meta["path"] for sample in found] == ["A.md", "a b/c.md", "a-b.md", "a/b.md", "z.md"]
    assert {sample.meta["path"]: sample.text for sample in found} == contents
    assert {sample.source for sample in found} == {"roam"}


@pytest.mark.parametrize("spelling", ["notes", "notes/", "./notes", "other/../notes", "~/notes"])
def test_the_path_is_relative_to_the_folder(tmp_path, monkeypatch, spelling):
    make(tmp_path, "notes/a.md", "notes/b/c.md", "other/d.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [sample.meta["path"] for sample in iter_roam(spelling)] == ["a.md", "b/c.md"]


def test_the_default_folder(tmp_path, monkeypatch):
    make(tmp_path, ".roam-data/a.md")
    monkeypatch.chdir(tmp_path)
    assert list(iter_roam()) == [PretrainSample("text of .roam-data/a.md", "roam", {"path": "a.md"})]


def test_take_reads_no_further(tmp_path):
    make(tmp_path, "a.md", "b.md")
    (tmp_path / "c.md").write_bytes(b"\xff")
    assert len(list(iter_roam(tmp_path, take=2))) == 2
    with pytest.raises(ValueError, match=r"c\.md"):
        list(iter_roam(tmp_path, take=3))


def test_a_note_that_is_not_utf8(tmp_path):
    make(tmp_path, "a.md", "c.md")
    (tmp_path / "b.md").write_bytes(b"caf\xe9")
    found = iter_roam(tmp_path)
    assert next(found).text == "text of a.md"
    with pytest.raises(ValueError, match=r"b\.md.*\b3\b"):
        next(found)
    replaced = [sample.text for sample in iter_roam(tmp_path, errors="replace")]
    assert replaced == ["text of a.md", "caf\ufffd", "text of c.md"]


def test_folders_without_notes(tmp_path):
    make(tmp_path, "file.md")
    (tmp_path / "empty").mkdir()
    assert list(iter_roam(tmp_path / "empty")) == []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(iter_roam(tmp_path / "nowhere"))
    with pytest.raises(NotADirectoryError, match=r"file\.md"):
        list(iter_roam(tmp_path / "file.md"))
