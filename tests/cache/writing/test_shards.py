"""Shards and document offsets of one split."""

import errno
import hashlib
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.cache.writing.shards import ShardWriter, load_split, starts_path, write_error
from tests.cache import check_checksums, read_offsets, read_tokens


def append(writer, tokens, starts=()):
    writer.append(np.array(tokens, dtype=np.int64), np.array(starts, dtype=np.int64))


def entry(number, tokens):
    data = np.array(tokens, dtype="<u2").tobytes()
    return {
        "name": f"shard_{number:05d}.bin",
        "bytes": len(data),
        "tokens": len(tokens),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def test_tokens_left_in_budget_and_shard(tmp_path):
    writer = ShardWriter(tmp_path / "train", 10, 8, None)
    assert (writer.tokens_left, writer.shard_tokens_left, writer.name) == (10, 4, "train")
    append(writer, [1, 2, 3], [0])
    assert (writer.tokens_left, writer.shard_tokens_left, writer.tokens) == (7, 1, 3)
    append(writer, [4])
    assert writer.shard_tokens_left == 0
    writer.close_shard()
    assert (writer.tokens_left, writer.shard_tokens_left) == (6, 4)
    assert writer.shards == [entry(0, [1, 2, 3, 4])]


def test_state_and_resume(tmp_path):
    """The open shard of an interrupted build is not part of its state."""
    writer = ShardWriter(tmp_path / "train", 100, 6, None)
    append(writer, [1, 2, 3], [0, 2])
    writer.close_shard()
    append(writer, [4, 5], [3])
    state = writer.state()
    starts_sha256 = hashlib.sha256(np.array([0, 2], dtype="<i8").tobytes()).hexdigest()
    assert state == {"shards": [entry(0, [1, 2, 3])], "documents": 2, "starts_sha256": starts_sha256}
    open_shard = writer._file
    writer.abandon()
    assert open_shard.closed
    writer.abandon()  # nothing is open

    resumed = ShardWriter(tmp_path / "train", 100, 6, load_split(tmp_path / "train", state))
    assert (resumed.tokens, resumed.starts, resumed.tokens_left) == (3, [0, 2], 97)
    append(resumed, [7, 8, 65_535], [4])
    resumed.close_shard()
    resumed.close_shard()  # nothing is open
    starts_sha256 = hashlib.sha256(np.array([0, 2, 4], dtype="<i8").tobytes()).hexdigest()
    shards = [entry(0, [1, 2, 3]), entry(1, [7, 8, 65_535])]
    assert resumed.state() == {"shards": shards, "documents": 3, "starts_sha256": starts_sha256}
    assert read_tokens(tmp_path / "train" / "shard_00001.bin") == [7, 8, 65_535]
    resumed.write_tables()
    shards = sorted((tmp_path / "train").glob("shard_*"))
    check_checksums(tmp_path / "train" / "checksums.npy", [path.read_bytes() for path in shards])
    assert read_offsets(tmp_path / "train" / "documents.npy") == [0, 2, 4]
    assert np.fromfile(starts_path(tmp_path / "train"), dtype="<i8").tolist() == [0, 2, 4]


def test_resume_truncates_offsets_past_the_state(tmp_path):
    writer = ShardWriter(tmp_path / "val", 100, 4, None)
    append(writer, [1, 2], [0, 1])
    writer.close_shard()
    with starts_path(tmp_path / "val").open("ab") as file:
        file.write(np.array([9, 9], dtype="<i8").tobytes())
    resumed = ShardWriter(tmp_path / "val", 100, 4, load_split(tmp_path / "val", writer.state()))
    assert resumed.starts == [0, 1]
    assert starts_path(tmp_path / "val").stat().st_size == 16


def test_fresh_writer_discards_old_offsets(tmp_path):
    starts_path(tmp_path / "train").write_bytes(b"12345678")
    assert ShardWriter(tmp_path / "train", 1, 2, None).starts == []
    assert starts_path(tmp_path / "train").read_bytes() == b""


@pytest.mark.parametrize(
    ("number", "named"),
    [
        (errno.ENOSPC, r"16 MiB.*free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "writable folder"),
        (errno.EROFS, "writable folder"),
        (errno.EIO, "no incomplete file"),
        (None, "no incomplete file"),
    ],
)
def test_write_errors_name_the_cache_and_the_remedy(number, named):
    error = write_error(OSError(number, "x") if number else OSError("x"), Path("some/cache"))
    assert error.errno == (number or errno.EIO)
    with pytest.raises(OSError, match=f"some/cache.*{named}"):
        raise error
    assert ("MiB" in str(error)) == (number == errno.ENOSPC)
