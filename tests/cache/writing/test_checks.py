"""Places where a cache must not be built: said before anything is read."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from niels_gpt.cache.writing import partial_build
from tests.cache import CASES, no_waiting, tree

KINDS = ["pretrain", "sft"]
NO_MORE = SimpleNamespace(free=partial_build.MARGIN_BYTES)


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def unread(items):
    pytest.fail("the input was read")
    yield


# --- a disk of its own -----------------------------------------------------------------------------------


def mounted(monkeypatch, folder):
    """Let a folder lie on another disk than what is beside it."""
    real = Path.stat

    def stat(self, **options):
        status = real(self, **options)
        if self != folder:
            return status
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:]))

    monkeypatch.setattr(Path, "stat", stat)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_disk_of_its_own_is_refused_before_work(tmp_path, monkeypatch, kind, linked):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    mounted(monkeypatch, tmp_path / "disk")
    with pytest.raises(ValueError, match="give a folder inside it") as caught:
        CASES[kind].build(tmp_path / ("link" if linked else "disk"), wrap=unread)
    assert str(tmp_path / "disk" / "cache") in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_on_such_a_disk_is_fine(tmp_path, monkeypatch, kind):
    (tmp_path / "disk").mkdir()
    mounted(monkeypatch, tmp_path / "disk")
    CASES[kind].build(tmp_path / "disk" / "cache")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["cache"]


# --- files that are not of a cache -----------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("name", ["note.txt", "shard_1.bin", "shard_00000.bin.bak", ".hidden", "sub/shard_00000.bin"])
@pytest.mark.parametrize("cache", [True, False])
def test_foreign_files_are_not_replaced(tmp_path, split, name, cache):
    case, folder = CASES["pretrain"], tmp_path / "c"
    if cache:
        case.build(folder)
    (folder / split / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / split / name).write_text("mine", encoding="utf-8")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="move it away, or choose another folder") as caught:
        case.build(folder, wrap=unread)
    assert str(folder / split / name.partition("/")[0]) in str(caught.value) and "\n" not in str(caught.value)
    assert tree(tmp_path) == before


def test_a_file_that_is_called_train_is_not_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"c/train is not of a cache"):
        CASES["pretrain"].build(tmp_path / "c", wrap=unread)
    assert tree(tmp_path) == {"c/train": b"mine"}


def test_caches_are_replaced_and_what_lies_beside_them_stays(tmp_path):
    case, folder = CASES["pretrain"], tmp_path / "c"
    case.build(tmp_path / "wanted")
    case.build(folder, seed=8, shard_bytes=32)
    (folder / "train" / "shard_123456.bin").write_bytes(b"\0\0")  # there are caches of so many shards
    (folder / "README").write_text("mine", encoding="utf-8")
    case.build(folder)
    assert tree(folder) == tree(tmp_path / "wanted") | {"README": b"mine"}


# --- the disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_says_what_stays_free(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(partial_build.shutil, "disk_usage", lambda path: NO_MORE)
    with pytest.raises(OSError, match=r"16 MiB stay free.*free some space") as caught:
        CASES[kind].build(tmp_path / "c")
    assert str(tmp_path / "c") in str(caught.value)
