import os
from pathlib import Path

import pytest
import torch

from niels_gpt.data.roam import list_roam_paths, load_texts, split_roam_paths


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")


# --- list --------------------------------------------------------------------------------------------


def test_all_markdown_files_at_any_depth(tmp_path):
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


def test_the_same_folder_gives_the_same_list_whatever_the_spelling(tmp_path, monkeypatch):
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
def test_what_is_not_utf8_is_named_with_the_byte_offset(tmp_path, data, offset, replaced):
    make(tmp_path, "good.md")
    bad = tmp_path / "bad note.md"
    bad.write_bytes(data)
    paths = [str(tmp_path / "good.md"), str(bad)]
    with pytest.raises(ValueError, match=rf"bad note\.md.*\b{offset}\b"):
        load_texts(paths)
    assert load_texts(paths, errors="replace") == ["text of good.md", replaced]


def test_a_file_that_is_gone_is_an_error(tmp_path):
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
