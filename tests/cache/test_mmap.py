import os

import numpy as np
import pytest

from niels_gpt.cache import mmap
from niels_gpt.cache.meta import CacheError
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
