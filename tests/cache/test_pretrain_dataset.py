import collections
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache import mmap
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from tests.cache import build_pretrain, memory_growth, meta_of, quick_folder, stream_of, write_tokens


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def bare(folder, sizes):
    """Shards without a meta; a token is its offset in the stream."""
    at = 0
    for number, size in enumerate(sizes):
        write_tokens(folder / f"shard_{number:05d}.bin", [i % 65_536 for i in range(at, at + size)])
        at += size
    return folder


def open_bare(folder, **changes):
    return PretrainTokenStreamDataset(str(folder), **{"T": 4, "device": "cpu", **changes})


def all_windows(shards, T):
    """(offset of the first token in the stream, x, y) of every window, shard by shard."""
    windows, at = [], 0
    for shard in shards:
        for start in range(len(shard) - T):
            windows.append((at + start, shard[start : start + T], shard[start + 1 : start + T + 1]))
        at += len(shard)
    return windows


DOCUMENTS = [f"document {i} " + "x" * (i * 7 % 23) for i in range(40)]


@pytest.fixture
def cache(tmp_path):
    budgets = {"max_train_tokens": 500, "max_val_tokens": 100}
    return build_pretrain(DOCUMENTS, tmp_path / "cache", shard_bytes=120, seed=1, **budgets)


# --- batches -----------------------------------------------------------------------------------------


def test_shapes_dtypes_and_memory(tmp_path):
    dataset = open_bare(bare(tmp_path, [50, 30]), T=7)
    for B in (1, 2, 33):
        x, y = dataset.get_batch(B=B, generator=generator())
        for tensor in (x, y):
            assert tensor.shape == (B, 7)
            assert tensor.dtype == torch.int64
            assert tensor.device == torch.device("cpu")
            assert tensor.is_contiguous()
        assert (y[:, :-1] == x[:, 1:]).all()
        before = y.clone()
        x.fill_(-1)  # x and y do not share memory
        assert torch.equal(y, before)
    again, _ = dataset.get_batch(B=33, generator=generator())
    assert (again >= 0).all()


def test_device_is_used(tmp_path):
    x, y = open_bare(bare(tmp_path, [50]), device="meta").get_batch(B=2, generator=generator())
    assert x.device.type == y.device.type == "meta"


def test_generator_state_determines_the_batch(tmp_path):
    bare(tmp_path, [500, 300])
    first, second = open_bare(tmp_path), open_bare(tmp_path)
    one, other = generator(5), generator(5)
    for _ in range(5):
        batches = [first.get_batch(B=8, generator=one), second.get_batch(B=8, generator=other)]
        assert torch.equal(batches[0][0], batches[1][0])
        assert torch.equal(batches[0][1], batches[1][1])
        assert torch.equal(one.get_state(), other.get_state())
    assert not torch.equal(
        first.get_batch(B=8, generator=generator(5))[0], first.get_batch(B=8, generator=generator(6))[0]
    )


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6), T=st.integers(1, 9), seed=st.integers(0, 1000))
def test_windows_equal_a_naive_loop(sizes, T, seed):
    ends = list(itertools.accumulate(sizes))
    shards = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    windows = all_windows(shards, T)
    with quick_folder() as folder:
        bare(folder, sizes)
        if not windows:
            with pytest.raises(CacheError, match=f"T \\+ 1 = {T + 1} tokens"):
                open_bare(folder, T=T)
            return
        dataset = open_bare(folder, T=T)
        assert dataset.num_windows == len(windows)
        assert dataset.num_tokens == sum(sizes)
        x, y = dataset.gather(list(range(len(windows))))
        assert x.tolist() == [window[1] for window in windows]
        assert y.tolist() == [window[2] for window in windows]
        assert [dataset.position(i) for i in range(len(windows))] == [window[0] for window in windows]
        drawn, _ = dataset.get_batch(B=40, generator=generator(seed))
        assert {tuple(row) for row in drawn.tolist()} <= {tuple(window[1]) for window in windows}


def test_starts_are_drawn_uniformly(tmp_path):
    """Shards of 3, 5, 12, 0, 31 and 4 tokens with T = 4 have 0, 1, 8, 0, 27 and 0 windows."""
    sizes = [3, 5, 12, 0, 31, 4]
    dataset = open_bare(bare(tmp_path, sizes))
    starts = [3, *range(8, 16), *range(20, 47)]
    draws = 36_000
    x, _ = dataset.get_batch(B=draws, generator=generator(11))
    seen = Counter(x[:, 0].tolist())
    assert sorted(seen) == starts
    chi_square = sum((seen[start] - 1000) ** 2 / 1000 for start in starts)
    assert chi_square < 66.6  # 35 degrees of freedom: one in a thousand
    assert chi_square > 14.7  # and not more even than chance either


def test_shard_of_exactly_one_window(tmp_path):
    dataset = open_bare(bare(tmp_path, [5]))
    x, y = dataset.get_batch(B=3, generator=generator())
    assert x.tolist() == [[0, 1, 2, 3]] * 3
    assert y.tolist() == [[1, 2, 3, 4]] * 3
    with pytest.raises(CacheError, match=r"T \+ 1 = 6.*1 shards.*5 tokens"):
        open_bare(tmp_path, T=5)


def test_B_or_T_below_1_raises(tmp_path):
    with pytest.raises(ValueError, match="B must be"):
        open_bare(bare(tmp_path, [10])).get_batch(B=0, generator=generator())
    with pytest.raises(ValueError, match="T must be"):
        open_bare(tmp_path, T=0)


# --- folders -----------------------------------------------------------------------------------------


def test_shards_without_a_meta(tmp_path):
    """Sorted by number, with gaps, past 99999, beside other files."""
    for number, tokens in ((100_000, [9, 9, 9]), (7, [1, 2, 3]), (99_999, [5, 6, 7])):
        write_tokens(tmp_path / f"shard_{number:05d}.bin", tokens)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    dataset = open_bare(tmp_path, T=2)
    assert dataset.meta is None
    assert dataset.gather([0, 1, 2])[0].tolist() == [[1, 2], [5, 6], [9, 9]]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_number_of_open_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "MAX_OPEN", 5)
    monkeypatch.setattr(mmap, "_open_files", collections.OrderedDict())
    dataset = open_bare(bare(tmp_path, [6] * 40))

    def open_files():
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.readlink().is_relative_to(tmp_path) for link in links)

    for window in range(0, 80, 8):
        x, _ = dataset.gather(list(range(window, window + 8)))
        assert x[:, 0].tolist() == [6 * (i // 2) + i % 2 for i in range(window, window + 8)]
        assert 0 < len(mmap._open_files) <= 5
        assert 0 < open_files() <= 5


# --- caches ------------------------------------------------------------------------------------------


def test_built_cache(cache):
    for split, tokens in (("train", 500), ("val", 100)):
        for verify in (False, True):
            dataset = open_bare(cache / split, verify=verify)
            assert dataset.num_tokens == tokens
            assert dataset.meta == meta_of(cache)


def test_empty_val_split_raises(tmp_path):
    build_pretrain(["abc" * 9], tmp_path / "c", max_train_tokens=100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CacheError, match="0 shards"):
        open_bare(tmp_path / "empty")
    with pytest.raises(CacheError, match=r"0 shards|T \+ 1"):
        open_bare(tmp_path / "c" / "val")


# --- documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "T"), [("train", 1), ("train", 37), ("val", 4)])
def test_every_window_is_located_in_its_document(cache, split, T):
    """Against a loop over the stream that counts documents."""
    stream = stream_of(cache, split)
    origins, document, offset = [], 0, 0
    for token in stream:
        origins.append((document, offset))
        document, offset = (document + 1, 0) if token == 259 else (document, offset + 1)
    dataset = open_bare(cache / split, T=T)
    starts = [i for i, (_, offset) in enumerate(origins) if offset == 0]
    assert dataset.documents.tolist() == starts
    assert len(starts) == meta_of(cache)[f"{split}_documents"]
    for window in range(dataset.num_windows):
        assert dataset.locate(window) == origins[dataset.position(window)]
    x, _ = dataset.gather(list(range(dataset.num_windows)))
    assert x[:, 0].tolist() == [stream[dataset.position(i)] for i in range(dataset.num_windows)]


# --- memory ------------------------------------------------------------------------------------------


def test_released_pages_give_the_same_batches(tmp_path, monkeypatch):
    bare(tmp_path, [5000, 7000])
    kept = open_bare(tmp_path)
    monkeypatch.setattr(mmap, "KEEP_BYTES", 0)
    monkeypatch.setattr(mmap, "RELEASE_BYTES", 1)
    released = open_bare(tmp_path)
    one, other = generator(), generator()
    for _ in range(5):
        assert torch.equal(kept.get_batch(B=9, generator=one)[1], released.get_batch(B=9, generator=other)[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_large_cache_is_sampled_in_little_memory(tmp_path, monkeypatch):
    """The pages of a sparse file of 256 MB are released; without releases, sampling would map most of them."""
    monkeypatch.setattr(mmap, "KEEP_BYTES", 0)
    monkeypatch.setattr(mmap, "RELEASE_BYTES", 8 << 20)
    path = tmp_path / "shard_00000.bin"
    path.touch()
    os.truncate(path, 256 << 20)
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    dataset = open_bare(tmp_path, T=256)
    assert memory_growth(dataset) < 64 << 20
    monkeypatch.setattr(mmap, "RELEASE_BYTES", 1 << 40)
    assert memory_growth(dataset) > 100 << 20
