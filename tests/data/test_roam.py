"""Notes: which files, their texts, and the split."""

import os

import pytest
import torch

from niels_gpt.data.roam import iter_roam, list_roam_paths, load_texts, split_roam_paths
from niels_gpt.data.types import PretrainSample


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")


def test_all_markdown_files_in_all_folders(tmp_path):
    make(tmp_path, "b.md", "a.md", "deep/er/c.md", "deep/d.md", ".hidden/e.md")
    make(tmp_path, "f.txt", "g.md.bak", "h.MD", "md", "i.markdown")
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


def test_every_spelling_of_a_folder_gives_the_same_list(tmp_path, monkeypatch):
    make(tmp_path, "notes/a.md", "notes/b/c.md")
    monkeypatch.chdir(tmp_path)
    wanted = [str(tmp_path / "notes" / name) for name in ("a.md", "b/c.md")]
    for root in ("notes", "notes/", "./notes", str(tmp_path / "notes")):
        assert list_roam_paths(root) == wanted
    (tmp_path / "empty").mkdir()
    assert list_roam_paths("empty") == []


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
        ("é".encode() * 5 + b"\x80x", 10, "ééééé\ufffdx"),  # bytes are counted, not characters
        (b"cut short \xe2\x82", 10, "cut short \ufffd"),
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


def test_a_sample_per_note(tmp_path):
    make(tmp_path, "b.md", "a/z.md", "a.md", "é/ü.md", "other.txt")
    wanted = ["a.md", "a/z.md", "b.md", "é/ü.md"]
    for root in (tmp_path, str(tmp_path)):
        assert list(iter_roam(root)) == [PretrainSample(f"text of {name}", "roam", {"path": name}) for name in wanted]


@pytest.mark.parametrize("spelling", ["notes/", "other/../notes", "~/notes"])
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
