"""Block checksums: computed in pieces, stored in a table, loaded again."""

import io
import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.checksums import BLOCK_BYTES, BlockHasher, load_array, open_checks, write_table
from niels_gpt.cache.formats import CacheError
from niels_gpt.system.files import sha256_bytes

DATA = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 100)


def digests(data):
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


@given(st.lists(st.integers(0, len(DATA)), max_size=6), st.integers(0, len(DATA)))
def test_blocks_do_not_depend_on_the_pieces(cuts, size):
    hasher = BlockHasher()
    bounds = [0, *sorted(min(cut, size) for cut in cuts), size]
    for begin, end in itertools.pairwise(bounds):
        hasher.update(DATA[begin:end])
    assert hasher.finish() == digests(DATA[:size])


def test_arrays_are_hashed_by_their_bytes():
    hasher = BlockHasher()
    hasher.update(np.frombuffer(DATA, dtype="<u2").data)
    assert hasher.finish() == digests(DATA)


def listed(**contents):
    return {name: {"bytes": len(data), "sha256": sha256_bytes(data)} for name, data in contents.items()}


@pytest.fixture
def table(tmp_path):
    """Files a (three blocks and a part), b (empty) and c (a part)."""
    contents = {"a": DATA, "b": b"", "c": DATA[:7]}
    write_table(tmp_path / "t.npy", [*digests(DATA), *digests(DATA[:7])])
    return listed(**contents, **{"t.npy": (tmp_path / "t.npy").read_bytes()})


def test_checks_of_each_file(tmp_path, table):
    a, b, c = open_checks(table, tmp_path, "t.npy", ["a", "b", "c"])
    assert [len(each.checksums) for each in (a, b, c)] == [4, 0, 1]
    assert a.matches(3, memoryview(DATA)[3 * BLOCK_BYTES :]) and c.matches(0, memoryview(DATA)[:7])
    assert not a.matches(2, memoryview(DATA)[3 * BLOCK_BYTES :])
    assert open_checks(table, tmp_path, "t.npy", ["a", "b", "c"]) is not None
    (old,) = open_checks(listed(a=DATA), tmp_path, "t.npy", ["a"])  # no table: the whole file
    assert old.matches(0, memoryview(DATA)) and not old.matches(0, memoryview(DATA)[1:])


def test_tables_that_do_not_fit_raise(tmp_path, table):
    for names in (["a"], ["a", "a"], []):
        with pytest.raises(CacheError, match=r"t\.npy does not match"):
            open_checks(table, tmp_path, "t.npy", names)
    (tmp_path / "t.npy").write_bytes(b"x")
    with pytest.raises(CacheError, match=r"t\.npy is damaged"):
        open_checks(table, tmp_path, "t.npy", ["a", "b", "c"])
    (tmp_path / "t.npy").unlink()
    with pytest.raises(CacheError, match=r"t\.npy is missing"):
        open_checks(table, tmp_path, "t.npy", ["a", "b", "c"])


def test_any_flip_of_a_header_is_a_cache_error_or_harmless(tmp_path):
    """Without a meta the sha256 is unknown; numpy raises TokenError, SyntaxError and others."""
    data = io.BytesIO()
    np.save(data, np.arange(3))
    for at in range(8 * 128):
        flipped = bytearray(data.getvalue())
        flipped[at // 8] ^= 1 << at % 8
        (tmp_path / "a.npy").write_bytes(flipped)
        try:
            load_array(tmp_path / "a.npy", None)
        except CacheError as err:
            assert "a.npy" in str(err) and "\n" not in str(err)
    with pytest.raises(FileNotFoundError):
        load_array(tmp_path / "b.npy", None)
