"""Folders appear completely or not at all, also when the process dies at any rename or fsync."""

import errno
import itertools
import os
from pathlib import Path

import pytest

from niels_gpt.system.files import atomic_folder, check_atomic_folder
from tests.faults import killed_at


def write(path, text, number=3):
    with atomic_folder(path) as folder:
        (folder / "inner").mkdir()
        for i in range(number):
            (folder / "inner" / f"{i}.txt").write_text(text, encoding="utf-8")


def texts(path):
    return [file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.txt"))]


def test_a_folder_is_written_and_replaced(tmp_path):
    path = tmp_path / "some" / "out"
    write(path, "a")
    assert texts(path) == ["a"] * 3
    write(path, "b", number=1)
    assert texts(path) == ["b"] and [entry.name for entry in path.parent.iterdir()] == ["out"]


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out"
    link.symlink_to("elsewhere")
    for text in ("a", "b"):
        write(link, text)
        assert link.is_symlink() and texts(tmp_path / "elsewhere") == [text] * 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "out"]


def test_folders_that_cannot_be_replaced(tmp_path, monkeypatch):
    """A rename would leave a shell in a folder that no longer exists, and cannot replace a mount point."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for path in (Path(), Path(".."), tmp_path / "inner"):
        with pytest.raises(ValueError, match=r"--out.*sub-folder"):
            check_atomic_folder(path, "--out")
    check_atomic_folder(Path("new"), "--out")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "disk")
    with pytest.raises(ValueError, match=r"disk is a mount point.*--out"):
        check_atomic_folder(Path("disk"), "--out")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("bad"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "out"
    for before in ([], ["a"] * 3):
        with pytest.raises(type(error)), atomic_folder(path) as folder:
            (folder / "half.txt").write_text("b", encoding="utf-8")
            raise error
        assert texts(tmp_path) == before
        write(path, "a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_errors_name_the_folder(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match=r"file/out.*choose another path"), atomic_folder(tmp_path / "file" / "out"):
        pass


def test_a_failing_rename_restores_the_old_folder(tmp_path, monkeypatch):
    path = tmp_path / "out"
    write(path, "a")
    real = Path.rename

    def rename(self, target):
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="previous folder is intact"):
            write(path, "b")
    assert texts(path) == ["a"] * 3 and [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_kill_leaves_the_old_or_the_new_folder_and_the_next_write_cleans_up(tmp_path):
    for number in itertools.count():
        folder = tmp_path / str(number)
        path = folder / "out"
        write(path, "a")
        killed = killed_at(number, lambda path=path: write(path, "b"))
        found = texts(path) if path.exists() else []
        assert found in ([], ["a"] * 3, ["b"] * 3)
        with pytest.raises(RuntimeError), atomic_folder(path):  # a write that fails recovers what the kill had moved
            raise RuntimeError
        assert texts(path) in (["a"] * 3, ["b"] * 3)
        assert [entry.name for entry in folder.iterdir()] == ["out"]
        if not killed:
            break
    assert number > 4 and texts(path) == ["b"] * 3


def test_a_failure_leaves_no_empty_parents(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "a" / "b" / "out"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_not_called_a_previous_one(tmp_path):
    """A command creates one to claim its name."""
    path = tmp_path / "out"
    path.mkdir()
    for expected in (False, True):
        with pytest.raises(OSError, match="cannot write") as caught, atomic_folder(path):
            raise OSError(errno.ENOSPC, "full")
        assert ("intact" in str(caught.value)) == expected
        write(path, "a")
