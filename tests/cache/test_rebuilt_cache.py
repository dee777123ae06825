"""A cache that is rebuilt while a dataset is open: the dataset reads the old tokens, or raises CacheError."""

import pickle
import threading

import numpy as np
import pytest
import torch

from niels_gpt.cache import meta as meta_module
from niels_gpt.cache import mmap
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.token_stream import TokenStream
from tests.cache import EOT, build_pretrain, build_sft, conversations, write_tokens

OLD = [f"the old note {i} " * 5 for i in range(30)]
NEW = [f"the new note {i} " * 5 for i in range(30)]


def open_pretrain(folder):
    return PretrainTokenStreamDataset(folder / "train", T=8, device="cpu")


def open_sft(folder):
    return SFTExampleDataset(folder / "train_tokens.bin", folder / "train_idx.npy", T=24, device="cpu", eot_id=EOT)


KINDS = {
    "pretrain": (lambda folder, new: build_pretrain(NEW if new else OLD, folder, shard_bytes=200), open_pretrain),
    "sft": (lambda folder, new: build_sft(conversations(20, "new" if new else "old"), folder), open_sft),
}


def batches(dataset, number=20):
    generator = torch.Generator().manual_seed(0)
    return [[tensor.tolist() for tensor in dataset.get_batch(B=8, generator=generator)] for _ in range(number)]


@pytest.mark.parametrize("kind", KINDS)
def test_open_dataset_reads_the_old_cache(tmp_path, kind):
    build, opened = KINDS[kind]
    folder = build(tmp_path / "cache", new=False)
    wanted, fingerprint = batches(opened(folder)), opened(folder).fingerprint()
    dataset = opened(folder)  # nothing was read from it
    build(folder, new=True)
    assert batches(dataset) == wanted and dataset.fingerprint() == fingerprint
    assert batches(opened(folder)) != wanted and opened(folder).fingerprint() != fingerprint


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "MAX_OPEN", 4)
    build, opened = KINDS["pretrain"]
    folder = build(tmp_path / "cache", new=False)
    dataset = opened(folder)
    wanted = batches(dataset)
    build(folder, new=False)  # the same tokens in new files
    assert batches(dataset) == wanted
    build(folder, new=True)
    with pytest.raises(
        CacheError, match=r"cache/train/shard_\d+\.bin .*(rebuilt|replaced|changed|after it was opened)"
    ):
        batches(dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_other_process_notices(tmp_path, kind):
    build, opened = KINDS[kind]
    folder = build(tmp_path / "cache", new=False)
    dataset = opened(folder)
    wanted = batches(dataset)
    pickled = pickle.dumps(dataset)
    assert batches(pickle.loads(pickled)) == wanted
    build(folder, new=True)
    with pytest.raises(CacheError, match=r"cache/train.*(rebuilt|opened)"):
        batches(pickle.loads(pickled))


def test_offsets_of_the_rebuilt_cache_are_refused(tmp_path):
    folder = KINDS["pretrain"][0](tmp_path / "cache", new=False)
    dataset = TokenStream(folder / "train")
    build_pretrain(NEW[:7], folder, shard_bytes=200)
    with pytest.raises(CacheError, match=r"documents\.npy is damaged, or the cache was rebuilt"):
        dataset.document(0)


def test_rebuild_while_opening(tmp_path, monkeypatch):
    """The shards that are opened belong to the meta that was read."""
    build, opened = KINDS["pretrain"]
    folder = build(tmp_path / "cache", new=False)
    real, calls = meta_module.read_meta, []

    def read_meta(path):
        meta = real(path)
        if len(calls) < rebuilds:
            calls.append(path)
            build(folder, new=len(calls) % 2 == 1)
        return meta

    monkeypatch.setattr(meta_module, "read_meta", read_meta)
    rebuilds = 1
    dataset = opened(folder)
    assert dataset.meta == real(folder / "meta.json") and "new" in bytes(dataset.document(0).tolist()[:-1]).decode()
    rebuilds = 100
    with pytest.raises(CacheError, match="changes all the time"):
        opened(folder)


def test_opening_while_builds_are_published(tmp_path):
    """A reader gets one cache or the other, or a CacheError; never a mix."""
    build, opened = KINDS["pretrain"]
    wanted = [batches(opened(build(tmp_path / name, new=name == "new")), 2) for name in ("old", "new")]
    folder = build(tmp_path / "cache", new=False)
    stop = threading.Event()

    def rebuild():
        number = 0
        while not stop.is_set():
            number += 1
            build(folder, new=number % 2 == 1)

    thread = threading.Thread(target=rebuild)
    thread.start()
    read = 0
    try:
        for _ in range(150):
            try:
                read += batches(opened(folder), 2) in wanted or pytest.fail("a mix of two caches")
            except CacheError:
                continue
    finally:
        stop.set()
        thread.join()
    assert read


def test_cache_that_is_being_replaced(tmp_path):
    (tmp_path / ".cache.partial").mkdir()
    (tmp_path / ".cache.partial" / "moving.json").touch()
    (tmp_path / "cache" / "train").mkdir(parents=True)
    write_tokens(tmp_path / "cache" / "train" / "shard_00000.bin", np.arange(100).tolist())
    with pytest.raises(CacheError, match="is being replaced by a build"):
        open_pretrain(tmp_path / "cache")
    (tmp_path / ".cache.partial" / "moving.json").unlink()
    assert open_pretrain(tmp_path / "cache").num_tokens == 100
