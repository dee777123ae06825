"""The user's cache folder: where it is, what it holds, and that nothing else is removed."""

import os
import stat
from pathlib import Path

import pytest

from niels_gpt.streams import StreamBuildConfig, load_streams
from niels_gpt.system import files
from niels_gpt.system.user_cache import (
    STREAMS,
    CacheEntry,
    cache_folder,
    create_private,
    list_entries,
    private_folder,
    remove_entry,
    why_unsafe,
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def build_streams(tmp_path, name="abc"):
    notes = tmp_path / "notes"
    notes.mkdir(exist_ok=True)
    for i in range(4):
        (notes / f"{i}.md").write_text(f"note {i} " * 20, encoding="utf-8")
    folder = private_folder(STREAMS, name)
    only = {"enabled_sources": ("roam",), "required_sources": ("roam",)}
    load_streams(StreamBuildConfig(roam_root=str(notes), cache_dir=str(folder), **only), T=8)
    return folder


def test_where_it_is(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "xdg/niels-gpt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home/.cache/niels-gpt"


def test_only_the_owner_can_read_it():
    before = os.umask(0)
    try:
        folder = private_folder("a", "b")
    finally:
        os.umask(before)
    for path in (folder, folder.parent, cache_folder()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(private_folder("a", "b").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_created_names_the_remedy(tmp_path):
    (tmp_path / "xdg").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match=r"xdg/niels-gpt.*XDG_CACHE_HOME.*data\.cache_dir"):
        private_folder("a")


def test_what_it_holds(tmp_path):
    assert list_entries() == []
    folder = build_streams(tmp_path)
    (cache_folder() / "attention-0123.so").write_bytes(b"x" * 10)
    (cache_folder() / "someone elses.txt").write_bytes(b"y")
    os.utime(folder, (2000, 2000))
    kernel, streams = sorted(list_entries(), key=lambda entry: entry.what, reverse=True)
    assert (kernel.bytes, kernel.path.name) == (10, "attention-0123.so")
    assert streams.path == folder and streams.used == 2000
    assert "roam" in streams.what and str(tmp_path / "notes") in streams.what
    assert streams.bytes == sum(path.stat().st_size for path in folder.iterdir())
    build_streams(tmp_path)  # read from the cache: used again
    assert next(entry.used for entry in list_entries() if entry.path == folder) > 2000


def test_entries_are_removed_and_nothing_else(tmp_path):
    folder = build_streams(tmp_path)
    kept = cache_folder() / "someone elses.txt"
    kept.write_bytes(b"y")
    (entry,) = list_entries()
    with files.lock(folder / "build.lock"):
        assert remove_entry(entry) is False
        assert (folder / "roam_train.bin").exists()
    assert remove_entry(entry) is True
    assert not folder.exists() and kept.exists() and (tmp_path / "notes/0.md").exists()
    for outside in (tmp_path / "notes", cache_folder().parent, cache_folder()):
        with pytest.raises(ValueError, match="outside"):
            remove_entry(CacheEntry(outside, "x", 0, 0.0))
        assert outside.exists()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_bytes(b"z")
    private_folder(STREAMS)
    (cache_folder() / STREAMS / "link").symlink_to(tmp_path / "precious")
    assert list_entries() == []
    remove_entry(CacheEntry(cache_folder() / STREAMS / "link", "x", 0, 0.0))
    assert Path(tmp_path / "precious/file").exists()


def test_only_a_folder_that_this_user_alone_can_write_is_safe(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    create_private(folder)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700  # parents too
    assert why_unsafe(folder) == ""
    (tmp_path / "a").chmod(0o757)
    assert why_unsafe(folder) == f"other users can write {tmp_path}/a: chmod go-w {tmp_path}/a"
    (tmp_path / "a").chmod(0o1777)  # sticky, as /tmp
    assert why_unsafe(folder) == ""
    folder.chmod(0o1777)  # files in the folder itself could be added
    assert "chmod go-w" in why_unsafe(folder)
    folder.chmod(0o700)
    (tmp_path / "a").chmod(0o757)
    monkeypatch.setattr("pathlib.Path.home", lambda: folder)  # what is above the home folder is not checked
    assert why_unsafe(folder) == ""


def test_a_link_is_judged_by_its_target(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    assert f"other users can write {tmp_path}/open" in why_unsafe(tmp_path / "link")


def test_a_folder_of_another_user_is_unsafe(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    assert f"{tmp_path} belongs to another user" in why_unsafe(tmp_path)
