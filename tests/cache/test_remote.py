"""Caches at URLs: what is read is what one local process wrote, checked on arrival, in a bounded local copy."""

import logging
import pickle
import uuid

import fsspec
import numpy as np
import pytest
import torch

from niels_gpt.cache import copies, remote
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.sources.build import install_tokenizer
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.cache.verify import verify_cache
from niels_gpt.splice.documents import OpenCache
from niels_gpt.system.user_cache import cache_folder, list_entries, remove_entry
from tests.cache import EOT, build_pretrain, build_sft, conversations, notes_cache, real_tokenizer, talk_cache, tree

DOCUMENTS = [f"document {i} " + "word " * 30 for i in range(60)]


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(copies.VARIABLE, raising=False)


@pytest.fixture
def url():
    address = f"memory://bucket-{uuid.uuid4().hex}/cache"
    yield address
    filesystem, path = fsspec.core.url_to_fs(address)
    filesystem.rm(path, recursive=True) if filesystem.exists(path) else None


@pytest.fixture
def published(url, tmp_path):
    """(URL, local folder) of one pretrain cache of many shards."""
    local = build_pretrain(DOCUMENTS, tmp_path / "notes", max_val_tokens=300, shard_bytes=1000)
    remote.publish_cache(local, url)
    return url, local


def at(url):
    """{name: bytes} of the files at a URL."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return {name.removeprefix(path).strip("/"): filesystem.cat_file(name) for name in filesystem.find(path)}


def change(url, data):
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(path, data)


def copied():
    """The token files that have a local copy."""
    return sorted((cache_folder() / "remote").rglob("*.bin"))


def test_a_published_cache_has_the_files_of_the_local_one(published):
    url, local = published
    assert at(url) == tree(local)


def test_publishing_writes_meta_last_and_removes_it_first(published, tmp_path, monkeypatch):
    url, _ = published
    other = build_pretrain(DOCUMENTS[:9], tmp_path / "other", shard_bytes=1000)
    filesystem = fsspec.filesystem("memory")
    put = type(filesystem).put_file

    def failing(self, source, target, **options):
        assert "meta.json" not in at(url)
        if "val/" in target:
            raise PermissionError("Access Denied")
        put(self, source, target, **options)

    monkeypatch.setattr(type(filesystem), "put_file", failing)
    with pytest.raises(PermissionError, match=rf"no permission to write {url}/val/\S+ \(Access Denied\): check"):
        remote.publish_cache(other, url)
    assert "meta.json" not in at(url)
    assert remote.published_meta(url) is None
    with pytest.raises(CacheError, match=f"no cache at {url}"):
        TokenStream(f"{url}/train")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    remote.publish_cache(other, url)
    assert at(url) == tree(other)  # nothing of the larger old cache is left


def test_published_meta_needs_all_files_of_their_size(published):
    url, _ = published
    assert remote.published_meta(url)["train_documents"] > 10
    change(f"{url}/train/shard_00001.bin", b"short")
    assert remote.published_meta(url) is None


def test_windows_of_a_url_are_those_of_the_local_cache(published):
    url, local = published
    mine, theirs = (PretrainTokenStreamDataset(f"{place}/train", T=16, device="cpu") for place in (local, url))
    assert copied() == []  # nothing is fetched before it is read
    assert mine.fingerprint() == theirs.fingerprint()
    for seed in range(20):
        a, b = (each.get_batch(B=4, generator=torch.Generator().manual_seed(seed)) for each in (mine, theirs))
        assert all(map(torch.equal, a, b))
    assert np.array_equal(mine.documents, theirs.documents)
    again = pickle.loads(pickle.dumps(theirs.shards[0]))
    assert np.array_equal(again.tokens, mine.shards[0].tokens)


def test_documents_of_splice_come_from_a_url(published):
    url, local = published
    mine, theirs = (OpenCache(place, "train", None).stream for place in (local, url))
    for number in (0, 7, len(mine.documents) - 1):
        assert np.array_equal(mine.document(number), theirs.document(number))


def test_examples_of_a_url_are_those_of_the_local_cache(url, tmp_path):
    local = build_sft(conversations(40), tmp_path / "talk")
    remote.publish_cache(local, url)
    options = {"T": 24, "device": "cpu", "eot_id": EOT}
    mine, theirs = (
        SFTExampleDataset(f"{place}/train_tokens.bin", f"{place}/train_idx.npy", **options) for place in (local, url)
    )
    a, b = (each.get_batch(B=8, generator=torch.Generator().manual_seed(3)) for each in (mine, theirs))
    assert all(map(torch.equal, a, b))


def test_only_what_is_read_is_fetched(published):
    url, _ = published
    stream = TokenStream(f"{url}/train")
    stream.document(0)
    assert [path.name for path in copied()] == ["shard_00000.bin"]


def test_a_shard_that_differs_from_its_hash_is_refused(published):
    url, local = published
    name = "train/shard_00002.bin"
    data = (local / name).read_bytes()
    change(f"{url}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    stream = TokenStream(f"{url}/train")
    assert np.array_equal(stream.shards[0].tokens, TokenStream(local / "train").shards[0].tokens)
    with pytest.raises(CacheError, match=rf"^{url}/{name} differs from its sha256 in meta.json"):
        _ = stream.shards[2].tokens
    assert len(copied()) == 1
    assert not list(cache_folder().rglob("*.part"))
    change(f"{url}/{name}", data)
    assert stream.shards[2].tokens.tobytes() == data


def test_a_shard_of_another_size_or_without_a_file_is_refused(published):
    url, _ = published
    change(f"{url}/train/shard_00000.bin", b"")
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{path}/train/shard_00001.bin")
    stream = TokenStream(f"{url}/train")
    with pytest.raises(CacheError, match=r"shard_00000.bin differs from its sha256"):
        _ = stream.shards[0].tokens
    with pytest.raises(CacheError, match=r"shard_00001.bin is missing, but meta.json lists it"):
        _ = stream.shards[1].tokens


def test_local_copies_stay_below_the_limit(published, monkeypatch):
    url, local = published
    stream = TokenStream(f"{url}/train")
    folder = cache_folder() / "remote"
    limit = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) + 5500  # metas, tables, 5 shards
    monkeypatch.setenv(copies.VARIABLE, str(limit / 1e9))
    wanted = TokenStream(local / "train")
    assert len(stream.shards) > 12
    kept = []
    for _ in range(2):
        for mine, theirs in zip(stream.shards, wanted.shards, strict=True):
            assert np.array_equal(mine.tokens, theirs.tokens)
            assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit
            kept.append(len(copied()))
    most = max(kept)
    assert 1 < most < len(stream.shards)
    assert min(kept[kept.index(most) :]) >= most - 1  # only the oldest goes, as much as the next one needs
    assert sum(shard._map is not None for shard in stream.shards) <= most  # a mapping would keep the space


def test_a_cache_larger_than_the_limit_is_announced(published, monkeypatch, caplog):
    url, _ = published
    monkeypatch.setenv(copies.VARIABLE, "0.000004")
    with caplog.at_level(logging.WARNING, logger="niels_gpt.cache"):
        PretrainTokenStreamDataset(f"{url}/train", T=8, device="cpu")
    assert copies.VARIABLE in caplog.text
    for text in ("many", "0", "-1", "nan"):
        monkeypatch.setenv(copies.VARIABLE, text)
        with pytest.raises(ValueError, match=f"{copies.VARIABLE} is '{text}': set it to a number of GB"):
            copies.size_limit()


def test_a_file_larger_than_the_limit_is_refused_when_it_is_opened(published, monkeypatch):
    url, _ = published
    monkeypatch.setenv(copies.VARIABLE, "0.0000009")
    with pytest.raises(CacheError, match=rf"^{url}/train/shard_00000.bin has 1,000 bytes, but .* may have 900: set"):
        TokenStream(f"{url}/train")
    assert copied() == []


DAMAGE = {"one bit": lambda data: bytes([data[0] ^ 1]) + data[1:], "truncated": lambda data: data[:-10],
          "longer": lambda data: data + b"more"}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["shard_00001.bin", "documents.npy", "checksums.npy"])
def test_a_damaged_copy_is_fetched_again(published, name, damage, caplog):
    url, local = published
    stream = TokenStream(f"{url}/train")
    assert len(stream.documents)
    whole = [shard.tokens.tobytes() for shard in stream.shards]
    copy = next((cache_folder() / "remote").rglob(name))
    good = copy.read_bytes()
    copy.unlink()
    copy.write_bytes(damage(good))
    again = TokenStream(f"{url}/train")
    assert [shard.tokens.tobytes() for shard in again.shards] == whole
    assert np.array_equal(again.documents, TokenStream(local / "train").documents)
    assert copy.read_bytes() == good
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_copy_that_is_damaged_while_it_is_mapped_is_fetched_again(published):
    url, local = published
    wanted = (local / "train/shard_00000.bin").read_bytes()
    shard = TokenStream(f"{url}/train").shards[0]
    assert shard.slice(0, 4).tobytes() == wanted[:8]
    with copied()[0].open("r+b") as file:
        file.truncate(100)
    shard.check_unchanged()
    assert shard.tokens.tobytes() == wanted


def test_a_damaged_copy_of_a_damaged_file_names_the_url(url, tmp_path, caplog):
    local = build_pretrain(DOCUMENTS, tmp_path / "notes", max_val_tokens=300, shard_bytes=1000)
    address = f"{url}/pretrain/notes"
    remote.publish_cache(local, address)
    _ = TokenStream(f"{address}/train").shards[0].tokens
    copied()[0].write_bytes(b"x" * 1000)
    change(f"{address}/train/shard_00000.bin", b"x" * 1000)
    with pytest.raises(CacheError, match=rf"^{address}/train/shard_00000.bin differs.* build it again: .*") as caught:
        _ = TokenStream(f"{address}/train").shards[0].tokens
    assert str(caught.value).endswith(f"cache build notes --cache-dir {url} --force")
    assert copied() == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_partial_download_of_a_killed_process_is_not_used(published):
    url, local = published
    folder = remote.local_folder(url)
    (folder / "train" / ".shard_00000.bin.part").write_bytes(b"half")
    stream = TokenStream(f"{url}/train")
    assert stream.shards[0].tokens.tobytes() == (local / "train/shard_00000.bin").read_bytes()
    assert not list(folder.rglob("*.part"))


def test_a_rebuilt_cache_gets_another_copy(published, tmp_path):
    url, _ = published
    old = remote.local_folder(url)
    assert remote.local_folder(url) == old
    new = build_pretrain(DOCUMENTS[::-1], tmp_path / "new", max_val_tokens=300, shard_bytes=1000)
    remote.publish_cache(new, url)
    assert remote.local_folder(url) != old
    assert TokenStream(f"{url}/train").shards[0].tokens.tobytes() == (new / "train/shard_00000.bin").read_bytes()
    with pytest.raises(CacheError, match="was rebuilt since this process opened it"):
        _ = TokenStream(old / "train").shards[0].tokens


def test_a_folder_of_caches_at_a_url(url, tmp_path):
    folder = tmp_path / "cache"
    (tmp_path / "spm.model").write_bytes(real_tokenizer().model)
    install_tokenizer(tmp_path / "spm.model", folder)
    remote.publish_tokenizer(folder, url)
    for local in (notes_cache(folder / "pretrain" / "notes"), talk_cache(folder / "sft" / "talk")):
        remote.publish_cache(local, f"{url}/{local.relative_to(folder)}")
    assert at(url) == tree(folder)
    opened = CacheFolder(url)
    assert opened.names("pretrain") == ["notes"]
    assert opened.names("sft") == ["talk"]
    opened.pretrain("notes", "train", T=8, verify=True)
    opened.sft("talk", "train", T=64)
    with pytest.raises(CacheError, match=f"no pretrain cache other in {url}: "):
        opened.check("pretrain", ["other"], option="data.retain")
    assert len(verify_cache(remote.local_folder(url, fresh=True))) == 2
    change(f"{url}/pretrain/notes/train/shard_00000.bin", b"x" * 200)
    with pytest.raises(CacheError, match="differs from its sha256"):
        verify_cache(remote.local_folder(url, fresh=True))


def test_another_tokenizer_at_the_url_is_not_replaced(url, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    for name in ("meta.json", "spm.model"):
        (tmp_path / "tokenizer" / name).write_bytes(b"mine")
    remote.publish_tokenizer(tmp_path, url)
    remote.publish_tokenizer(tmp_path, url)
    change(f"{url}/tokenizer/spm.model", b"theirs")
    with pytest.raises(CacheError, match="another tokenizer"):
        remote.publish_tokenizer(tmp_path, url)
    assert at(url)["tokenizer/spm.model"] == b"theirs"


def test_nothing_at_a_url(url):
    with pytest.raises(CacheError, match=f"no cache at {url}"):
        CacheFolder(url)


def test_copies_can_be_removed(published):
    url, _ = published
    _ = TokenStream(f"{url}/train").shards[0].tokens
    entries = [entry for entry in list_entries() if "remote" in entry.what]
    assert len(entries) == 1
    assert entries[0].bytes > 1000
    assert remove_entry(entries[0])
    assert list_entries() == []
