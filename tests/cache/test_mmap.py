import contextlib
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.cache import mmap
from niels_gpt.cache.checksums import BLOCK_BYTES, BlockChecks, BlockHasher
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.mmap import MappedFiles, MappedTokens
from tests.cache import write_tokens


def test_tokens_of_a_file(tmp_path):
    tokens = [0, 1, 255, 256, 65_535, 7]
    mapped = MappedTokens(write_tokens(tmp_path / "a.bin", tokens))
    assert mapped.size == 6
    assert mapped.tokens.dtype.str == "<u2"
    assert mapped.tokens.tolist() == tokens
    with pytest.raises(ValueError, match="read-only"):
        mapped.tokens[0] = 5


def test_file_is_mapped_not_read(tmp_path):
    """A change of the file is visible."""
    path = write_tokens(tmp_path / "a.bin", list(range(10_000)))
    mapped = MappedTokens(path)
    assert mapped.tokens[9000] == 9000
    with path.open("r+b") as file:
        file.seek(18_000)
        file.write(b"\x05\x00")
    assert mapped.tokens[9000] == 5


def test_bytes_of_a_file(tmp_path):
    mapped = MappedTokens(write_tokens(tmp_path / "a.bin", [1, 65_535, 258]))
    assert bytes(mapped.read(0, 6)) == b"\x01\x00\xff\xff\x02\x01"
    assert bytes(mapped.read(2, 4)) == b"\xff\xff"
    assert mapped.slice(1, 3).tolist() == [65_535, 258]
    with pytest.raises(TypeError, match="read-only"):
        mapped.read(0, 6)[0] = 5
    empty = MappedTokens(write_tokens(tmp_path / "b.bin", []))
    assert (empty.size, empty.tokens.tolist(), bytes(empty.read(0, 0))) == (0, [], b"")
    assert empty.tokens.dtype.str == "<u2"
    empty.release()


@pytest.mark.parametrize("size", [1, 3, 1001])
def test_odd_size_is_named(tmp_path, size):
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(CacheError, match=rf"a\.bin.*\b{size:,} bytes"):
        MappedTokens(tmp_path / "a.bin")
    with pytest.raises(CacheError, match="odd"):
        MappedTokens(write_tokens(tmp_path / "b.bin", [1, 2]), size)


def test_truncated_file_is_noticed(tmp_path):
    mapped = MappedTokens(write_tokens(tmp_path / "a.bin", [1, 2, 3]))
    mapped.check_unchanged()
    assert not mapped.is_truncated()
    os.truncate(tmp_path / "a.bin", 2)
    assert mapped.is_truncated()
    with pytest.raises(CacheError, match=r"a\.bin was truncated .*\b6 bytes, now 2\b"):
        mapped.check_unchanged()


def test_tokens_are_unchanged_after_release(tmp_path):
    tokens = np.arange(100_000) % 65_536
    mapped = MappedTokens(write_tokens(tmp_path / "a.bin", tokens.tolist()))
    mapped.release()  # not mapped yet
    view = mapped.tokens
    for _ in range(3):
        assert (view == tokens).all()
        mapped.release()


class Counting(MappedTokens):
    released = 0

    def release(self):
        self.released += 1
        super().release()


@pytest.mark.parametrize(("keep", "releases"), [(2000, [0, 0, 0, 0, 0]), (1999, [0, 0, 0, 1, 2])])
def test_pages_of_large_caches_are_released(tmp_path, monkeypatch, keep, releases):
    """Two files of 1,000 bytes; a row maps 110 bytes, and exactly 440 may be mapped."""
    monkeypatch.setattr(mmap, "KEEP_BYTES", keep)
    monkeypatch.setattr(mmap, "RELEASE_BYTES", 440)
    monkeypatch.setattr(mmap, "FAULT_BYTES", 100)
    mapped = [Counting(write_tokens(tmp_path / name, [1] * 500)) for name in ("a", "b")]
    files = MappedFiles(mapped)
    seen = []
    for rows in (1, 2, 1, 1, 9):
        files.touched(rows, 10)
        seen.append([file.released for file in mapped])
    assert seen == [[n, n] for n in releases]


# --- files that change -------------------------------------------------------------------------------


def checked(path, tokens):
    """A mapped file with checksums."""
    write_tokens(path, tokens)
    hasher = BlockHasher()
    hasher.update(path.read_bytes())
    return MappedTokens(path, None, BlockChecks(BLOCK_BYTES, np.array(hasher.finish(), dtype="<u8")))


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_blocks_are_checked_when_they_are_first_read(tmp_path):
    tokens = (np.arange(100_000) % 65_536).tolist()  # four blocks, the last of 3,392 bytes
    mapped = checked(tmp_path / "a.bin", tokens)
    flip(tmp_path / "a.bin", 2 * BLOCK_BYTES)
    assert mapped.slice(0, 65_536).tolist() == tokens[:65_536]
    assert mapped.slice(98_304, 100_000).tolist() == tokens[98_304:]
    for begin, end in ((65_535, 65_537), (65_536, 65_537), (0, 100_000), (98_303, 98_304)):
        with pytest.raises(CacheError, match=r"a\.bin is damaged .*bytes 131,072 to 196,607 .*build the cache again"):
            mapped.slice(begin, end)
    flip(tmp_path / "a.bin", 2 * BLOCK_BYTES)
    assert mapped.tokens.tolist() == tokens


def test_file_that_was_written_to_is_checked_again(tmp_path):
    mapped = checked(tmp_path / "a.bin", list(range(100)))
    before = mapped.tokens.tolist()
    os.utime(tmp_path / "a.bin", (1, 1))
    mapped.check_unchanged()
    assert mapped.tokens.tolist() == before
    flip(tmp_path / "a.bin", 7)
    mapped.check_unchanged()
    with pytest.raises(CacheError, match=r"a\.bin is damaged"):
        mapped.read(0, 2)


def test_changes_are_noticed_while_batches_are_read(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(mmap.time, "monotonic", lambda: now)
    mapped = checked(tmp_path / "a.bin", list(range(100)))
    files = MappedFiles([mapped])
    os.truncate(tmp_path / "a.bin", 100)
    files.touched(1, 10)
    now += mmap.CHECK_SECONDS
    with pytest.raises(CacheError, match="truncated"):
        files.touched(1, 10)


@pytest.mark.parametrize("with_checks", [False, True])
def test_replaced_file(tmp_path, monkeypatch, with_checks):
    """A mapped file stays what it was; one that must be mapped again is noticed."""
    path = tmp_path / "a.bin"
    mapped = checked(path, [1, 2, 3]) if with_checks else MappedTokens(write_tokens(path, [1, 2, 3]))
    again = pickle.loads(pickle.dumps(mapped))
    assert again.tokens.tolist() == [1, 2, 3]
    pickled = pickle.dumps(mapped)
    write_tokens(tmp_path / "new", [1, 2, 4]).replace(path)
    for file in (mapped, again):
        file.check_unchanged()
        assert file.tokens.tolist() == [1, 2, 3]
        file._unmap()
        with pytest.raises(CacheError, match=r"a\.bin .*since it was opened|a\.bin was replaced"):
            file.tokens  # noqa: B018
    with pytest.raises(CacheError, match=r"a\.bin"):
        pickle.loads(pickled).tokens  # noqa: B018
    write_tokens(tmp_path / "new", [1, 2]).replace(path)
    mapped._unmap()
    with pytest.raises(CacheError, match=r"a\.bin was truncated .*6 bytes, now 4"):
        mapped.tokens  # noqa: B018


# --- open files --------------------------------------------------------------------------------------


def test_a_quarter_of_the_open_files_at_most(monkeypatch):
    for limit, wanted in ((None, 1024), (20_000, 1024), (1024, 256), (256, 64), (3, 1)):
        monkeypatch.setattr(mmap, "open_file_limit", lambda limit=limit: limit)
        assert mmap.max_open() == wanted
    monkeypatch.undo()
    assert mmap.open_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors():
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_deleted_datasets_close_their_files(tmp_path):
    write_tokens(tmp_path / "a.bin", [1, 2])
    before = len(descriptors())
    mapped = [MappedTokens(tmp_path / "a.bin") for _ in range(10)]
    assert len(descriptors()) == before + 10
    del mapped
    assert len(descriptors()) == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_too_many_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mapped = [MappedTokens(write_tokens(tmp_path / str(i), [i])) for i in range(8)]
    for file in mapped[:4]:
        file._unmap()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 1, hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(tmp_path / "0", os.O_RDONLY))
        assert mapped[0].tokens.tolist() == [0]  # others are unmapped
        mmap._open_files.clear()
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(tmp_path / "0", os.O_RDONLY))
        with pytest.raises(CacheError, match=r"Too many open files; the limit is \d+ and 2 more .*ulimit -n"):
            mapped[1].tokens  # noqa: B018
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert [file.tokens.tolist() for file in mapped] == [[i] for i in range(8)]
