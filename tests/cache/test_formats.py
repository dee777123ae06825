import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache import formats
from niels_gpt.cache.formats import as_tokens, dtype_name, list_shards, shard_name, splits_of
from niels_gpt.cache.sources import defaults


def test_defaults_of_the_spec():
    assert (defaults.SEED, defaults.SHARD_BYTES) == (42, 134_217_728)
    assert (defaults.FINEWEB_CONFIG, defaults.FINEWEB_SHUFFLE_BUFFER) == ("CC-MAIN-2024-10", 10_000)
    assert (defaults.FINEWEB_TRAIN_TOKENS, defaults.FINEWEB_VAL_TOKENS) == (200_000_000, 5_000_000)
    assert (defaults.SFT_VAL_FRAC, defaults.VOCAB_SIZE) == (0.10, 16_000)
    assert formats.SPLITS == ("train", "val")


def test_dtypes_and_versions_of_the_format():
    """uint16 is format version 1; a version of niels-gpt that knows only uint16 refuses version 2."""
    known = [(dtype_name(dtype), dtype.str, version) for dtype, version in formats.FORMAT_VERSIONS.items()]
    assert known == [("uint16-le", "<u2", 1), ("uint32-le", "<u4", 2)]
    assert {name: dtype.str for name, dtype in formats.TOKEN_DTYPES.items()} == {"uint16-le": "<u2", "uint32-le": "<u4"}


def test_splits_of_a_meta():
    assert splits_of({"train_tokens": 5, "val_tokens": 0}) == ("train", "val")
    assert splits_of({"train_tokens": 5, "val_tokens": 0, "test_tokens": 0}) == ("train", "val", "test")


def test_shard_names():
    assert [shard_name(n) for n in (0, 99_999, 100_000)] == ["shard_00000.bin", "shard_99999.bin", "shard_100000.bin"]


def test_list_shards_returns_only_shards_in_order(tmp_path):
    numbers = [100_000, 3, 99_999, 0, 100_001, 20_000]
    others = ["documents.npy", "shard_00000.bin.tmp", ".shard_00007.bin", "xshard_00001.bin", "meta.json", "shard.bin"]
    for name in [*(shard_name(n) for n in numbers), *others]:
        (tmp_path / name).touch()
    assert list_shards(tmp_path) == [tmp_path / shard_name(n) for n in sorted(numbers)]
    assert list_shards(tmp_path / "nowhere") == []


@given(st.lists(st.integers(0, 299)), st.sampled_from([list, tuple, np.int64, np.uint16, np.dtype(">i4")]))
def test_tokens_are_little_endian_uint16(ids, kind):
    given_ids = kind(ids) if kind in (list, tuple) else np.array(ids, dtype=kind)
    tokens = as_tokens(given_ids, 300)
    assert tokens.dtype.str == "<u2"
    assert tokens.tobytes() == b"".join(struct.pack("<H", i) for i in ids)


def test_full_range_of_16_bits():
    assert as_tokens([0, 65_535], 65_536).tobytes() == b"\x00\x00\xff\xff"


def test_vocabulary_past_16_bits_is_stored_in_32():
    for ids in ([0, 65_535, 65_536], np.array([0, 65_535, 65_536], dtype=np.int64)):
        assert as_tokens(ids, 65_537).tobytes() == struct.pack("<III", 0, 65_535, 65_536)
    assert as_tokens([], 65_537).dtype.str == "<u4"
    assert as_tokens([2**31 - 1], 2**31).tobytes() == b"\xff\xff\xff\x7f"


@pytest.mark.parametrize(
    ("ids", "vocab", "named"),
    [
        ([1, -1, 2], 10, "-1"),
        ([1, 10], 10, "10"),
        ([65_536], 65_536, "65536"),
        ([100_000], 100_000, "100000"),
        (np.array([2**32 + 5]), 100_000, "4294967301"),  # would wrap around to 5
        ([70_000], 300, "70000"),
        (np.array([-65_536 + 5]), 10, "-65531"),  # would wrap around to 5
        (np.array([2**32 + 5]), 10, "4294967301"),
        (np.array([2**63 + 5], dtype=np.uint64), 10, "9223372036854775813"),
    ],
)
def test_id_that_cannot_be_stored_is_named(ids, vocab, named):
    with pytest.raises(ValueError, match=rf"{named}\b.*0\.\."):
        as_tokens(ids, vocab)


@pytest.mark.parametrize("ids", [[1.0], [1.5], [True], ["1"], [None], [2**70], [float("nan")]])
def test_non_integers_raise(ids):
    with pytest.raises(ValueError, match="integers"):
        as_tokens(ids, 300)
