"""Checks of numbers, tokenizers, disks and folders, all before the input is read."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from niels_gpt.cache.writing import checks
from niels_gpt.cache.writing.checks import check_seed, check_shard_bytes, check_space, check_tokenizer
from tests.cache import CASES, IDS, ByteTokenizer, tree

KINDS = ["pretrain", "sft"]


def unread(items):
    pytest.fail("the input was read")
    yield


# --- mount points --------------------------------------------------------------------------------------


def mounted(monkeypatch, folder):
    """Pretend that a folder is on another file system than its parent."""
    real = Path.stat

    def stat(self, **options):
        status = real(self, **options)
        if self != folder:
            return status
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:]))

    monkeypatch.setattr(Path, "stat", stat)


@pytest.mark.parametrize(("kind", "linked"), [("pretrain", True), ("sft", False)])
def test_mount_point_raises(tmp_path, monkeypatch, kind, linked):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    mounted(monkeypatch, tmp_path / "disk")
    with pytest.raises(ValueError, match="sub-folder") as caught:
        CASES[kind].build(tmp_path / ("link" if linked else "disk"), wrap=unread)
    assert str(tmp_path / "disk" / "cache") in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("kind", KINDS)
def test_folder_on_a_mounted_disk_works(tmp_path, monkeypatch, kind):
    (tmp_path / "disk").mkdir()
    mounted(monkeypatch, tmp_path / "disk")
    CASES[kind].build(tmp_path / "disk" / "cache")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["cache"]


# --- foreign files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "name", "cache"),
    [
        ("train", "note.txt", True),
        ("val", "shard_1.bin", False),
        ("test", "shard_00000.bin.bak", True),
        ("train", ".hidden", False),
        ("val", "sub/shard_00000.bin", True),
    ],
)
def test_foreign_files_are_not_replaced(tmp_path, split, name, cache):
    case, folder = CASES["pretrain"], tmp_path / "c"
    if cache:
        case.build(folder)
    (folder / split / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / split / name).write_text("mine", encoding="utf-8")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"move it.*another folder") as caught:
        case.build(folder, wrap=unread)
    assert str(folder / split / name.partition("/")[0]) in str(caught.value) and "\n" not in str(caught.value)
    assert tree(tmp_path) == before


def test_file_named_train_is_not_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"c/train\b"):
        CASES["pretrain"].build(tmp_path / "c", wrap=unread)
    assert tree(tmp_path) == {"c/train": b"mine"}


def test_caches_are_replaced_and_other_files_stay(tmp_path):
    case, folder = CASES["pretrain"], tmp_path / "c"
    case.build(tmp_path / "wanted")
    case.build(folder, seed=8, shard_bytes=32)
    (folder / "train" / "shard_123456.bin").write_bytes(b"\0\0")  # a shard name past five digits
    (folder / "README").write_text("mine", encoding="utf-8")
    case.build(folder)
    assert tree(folder) == tree(tmp_path / "wanted") | {"README": b"mine"}


# --- disk space ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (999, False)])
def test_check_space(tmp_path, monkeypatch, free, fits):
    """The space of the nearest existing folder is compared."""
    asked = []
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: asked.append(path) or usage)
    folder = tmp_path / "a" / "b"
    if fits:
        check_space(folder, 1000)
    else:
        with pytest.raises(OSError, match=r"0\.00 GB") as caught:
            check_space(folder, 1000)
        assert str(folder) in str(caught.value)
    assert asked == [tmp_path]


# --- numbers and tokenizers ------------------------------------------------------------------------------


def test_boundaries_of_numbers():
    for seed in (0, 2**63 - 1):
        check_seed(seed)
    for seed in (-1, 2**63, True, 1.0, None):
        with pytest.raises(ValueError, match=f"seed.*{seed!r}"):
            check_seed(seed)
    for size in (2, 4, 128 << 20):
        check_shard_bytes(size)
    for size in (0, 1, 3, -2):
        with pytest.raises(ValueError, match=f"shard_bytes.*{size}"):
            check_shard_bytes(size)
    for size in (4, 8, 128 << 20):
        check_shard_bytes(size, np.dtype("<u4"))
    for size in (0, 2, 6, -4):
        with pytest.raises(ValueError, match=f"shard_bytes.*4 bytes.*{size}"):
            check_shard_bytes(size, np.dtype("<u4"))


@pytest.mark.parametrize(
    ("vocab", "fits"), [(65_536, True), (2**31, True), (2**31 + 1, False), (260, True), (259, False), (0, False)]
)
def test_boundaries_of_the_vocabulary(vocab, fits):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab
    if fits:
        check_tokenizer(tokenizer)
    else:
        with pytest.raises(ValueError, match=rf"{vocab:,} ids|eot is 259.*0\.\.{vocab - 1}"):
            check_tokenizer(tokenizer)


@pytest.mark.parametrize(("ids", "named"), [({**IDS, "sys": -1}, "sys is -1"), ({"sys": 1}, "usr is None")])
def test_special_ids_must_be_in_the_vocabulary(ids, named):
    tokenizer = ByteTokenizer()
    tokenizer.special_token_ids = lambda: ids
    with pytest.raises(ValueError, match=named):
        check_tokenizer(tokenizer)
    tokenizer.special_token_ids = lambda: {**IDS, "sys": 0}
    check_tokenizer(tokenizer)
