"""Caches of a vocabulary past 65,536 ids: uint32 from the build to the batches, against naive references."""

import dataclasses
import errno
import json
import pickle
import shutil
import signal
import struct
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch

from niels_gpt.cache import folder, remote
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.mixture import Mixture
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.cache.verify import differences, stream_slice, verify_cache
from niels_gpt.cache.writing import checks, encoding
from niels_gpt.cli import cache as cli
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.model.gpt import GPT
from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.splice.packing import pack
from niels_gpt.splice.tensors import to_tensors
from niels_gpt.training.tasks.registry import open_task
from tests.cache import (
    CASES,
    WIDE_IDS,
    WideTokenizer,
    build_and_die,
    build_pretrain,
    build_sft,
    chat_ids,
    check_checksums,
    conversations,
    exit_code,
    masked_row,
    meta_of,
    quick_folder,
    read_offsets,
    split_rule,
    start,
    tree,
    write_tokens,
)
from tests.splice import NULL
from tests.token_caches import small_config

TEXTS = [f"note {i}: " + "the quick brown fox " * (i % 5 + 1) for i in range(40)]
TALKS = [talk for talk in conversations(40) if talk]
SHARD_BYTES = 1000
T = 24


def document_ids(text):
    return [1000 * byte + 7 for byte in text.encode("utf-8")] + [WIDE_IDS["eot"]]


STREAM = [token for text in TEXTS for token in document_ids(text)]


def tokens_of(path):
    data = path.read_bytes()
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "notes"
    return build_pretrain(TEXTS, path, tokenizer=WideTokenizer(), val_texts=TEXTS[:9], max_val_tokens=10**6,
                          shard_bytes=SHARD_BYTES)  # fmt: skip


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    return build_sft(TALKS, tmp_path_factory.mktemp("wide") / "talk", tokenizer=WideTokenizer())


def open_sft(path, split="train"):
    paths = path / f"{split}_tokens.bin", path / f"{split}_idx.npy"
    return SFTExampleDataset(*paths, T=T, device="cpu", eot_id=WIDE_IDS["eot"])


# --- files ---------------------------------------------------------------------------------------------


def test_files_of_a_pretrain_cache(pretrain):
    shards = sorted((pretrain / "train").glob("shard_*.bin"))
    data = struct.pack(f"<{len(STREAM)}I", *STREAM)
    assert b"".join(path.read_bytes() for path in shards) == data
    assert {path.stat().st_size for path in shards[:-1]} == {SHARD_BYTES}
    check_checksums(pretrain / "train" / "checksums.npy", [path.read_bytes() for path in shards])
    starts = np.cumsum([0, *(len(document_ids(text)) for text in TEXTS)])[:-1].tolist()
    assert read_offsets(pretrain / "train" / "documents.npy") == starts
    meta = meta_of(pretrain)
    assert (meta["token_dtype"], meta["format_version"], meta["vocab_size"]) == ("uint32-le", 2, 260_000)
    assert meta["train_tokens"] == len(STREAM)
    for path in shards:
        assert meta["files"][f"train/{path.name}"]["tokens"] * 4 == path.stat().st_size
    assert max(STREAM) > 65_535 > min(STREAM)


def test_files_of_an_sft_cache(sft):
    meta = meta_of(sft)
    assert (meta["token_dtype"], meta["format_version"]) == ("uint32-le", 2)
    for split, examples in split_rule(TALKS, 0.25, 42).items():
        sequences = [chat_ids(example, WideTokenizer()) for example in examples]
        assert tokens_of(sft / f"{split}_tokens.bin") == [token for ids in sequences for token in ids]
        check_checksums(sft / f"{split}_checksums.npy", [(sft / f"{split}_tokens.bin").read_bytes()])
        assert read_offsets(sft / f"{split}_idx.npy") == np.cumsum([0, *map(len, sequences)])[:-1].tolist()
        assert meta[f"{split}_tokens"] == sum(map(len, sequences))


def test_blocks_of_64_kb_are_checked(tmp_path):
    """16,384 tokens per block: a change in the second block is not noticed in the first."""
    path = build_pretrain(["x" * 40_000], tmp_path / "c", tokenizer=WideTokenizer(), shard_bytes=1 << 20)
    shard = path / "train" / "shard_00000.bin"
    data = bytearray(shard.read_bytes())
    data[4 * 16_384] ^= 1
    shard.write_bytes(data)
    stream = TokenStream(path / "train")
    out = np.empty(16_384, dtype=np.uint32)
    stream.read(0, out)
    assert set(out.tolist()) == {120_007}
    with pytest.raises(CacheError, match="65,536 to 131,071"):
        stream.read(16_383, out[:2])


@pytest.mark.parametrize("size", [2, 6])
def test_incomplete_token_at_the_end_raises(pretrain, tmp_path, size):
    path = shutil.copytree(pretrain, tmp_path / "c")
    meta = read_meta(path / "meta.json")
    meta["files"] = {}
    (path / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "files"}))
    shard = sorted((path / "train").glob("shard_*.bin"))[-1]
    shard.write_bytes(shard.read_bytes()[:-size])
    with pytest.raises(CacheError, match=rf"{shard.name}.* 4 bytes"):
        TokenStream(path / "train")


def test_shards_without_a_meta_are_uint16(tmp_path):
    write_tokens(tmp_path / "train" / "shard_00000.bin", list(range(60_000, 60_040)))
    dataset = PretrainTokenStreamDataset(tmp_path / "train", T=4, device="cpu")
    assert dataset.dtype == np.uint16
    assert dataset.gather([3])[0].tolist() == [[60_003, 60_004, 60_005, 60_006]]


def test_a_meta_of_another_dtype_than_the_files_raises(pretrain, sft, tmp_path):
    for source, opened in ((pretrain, lambda path: TokenStream(path / "train")), (sft, open_sft)):
        path = shutil.copytree(source, tmp_path / source.name)
        meta = meta_of(path)
        (path / "meta.json").write_text(json.dumps({**meta, "token_dtype": "uint16-le", "format_version": 1}))
        with pytest.raises(CacheError, match=f"train_tokens {meta['train_tokens']:,}.*{2 * meta['train_tokens']:,}"):
            opened(path)


# --- readers -------------------------------------------------------------------------------------------


def windows():
    """All windows of T + 1 tokens, shard by shard."""
    width = SHARD_BYTES // 4
    shards = [STREAM[at : at + width] for at in range(0, len(STREAM), width)]
    return [shard[at : at + T + 1] for shard in shards for at in range(len(shard) - T)]


def test_batches_of_windows(pretrain):
    dataset = PretrainTokenStreamDataset(pretrain / "train", T=T, device="cpu")
    wanted = windows()
    assert dataset.num_windows == len(wanted)
    for opened in (dataset, pickle.loads(pickle.dumps(dataset))):
        x, y = opened.get_batch(B=50, generator=torch.Generator().manual_seed(3))
        drawn = torch.randint(len(wanted), (50,), generator=torch.Generator().manual_seed(3)).tolist()
        assert x.tolist() == [wanted[i][:-1] for i in drawn]
        assert y.tolist() == [wanted[i][1:] for i in drawn]
        assert x.dtype == torch.int64 and int(x.max()) > 65_535


def test_documents_and_slices(pretrain, sft):
    stream = TokenStream(pretrain / "train")
    for i, text in enumerate(TEXTS):
        document = stream.document(i)
        assert document.dtype.str == "<u4" and document.tolist() == document_ids(text)
    for start_at, length in ((0, 5), (240, 700), (len(STREAM) - 3, 9)):
        found = stream_slice(pretrain, "train", start_at, length)
        assert found.dtype.str == "<u4" and found.tolist() == STREAM[start_at : start_at + length]
    assert stream_slice(sft, "train", 2, 9).tolist() == tokens_of(sft / "train_tokens.bin")[2:11]


def test_batches_of_conversations(sft):
    dataset = open_sft(sft)
    sequences = [chat_ids(talk, WideTokenizer()) for talk in split_rule(TALKS, 0.25, 42)["train"]]
    rows = [masked_row(ids, T, eot=WIDE_IDS["eot"], asst=WIDE_IDS["asst"]) for ids in sequences]
    usable = [row for row in rows if set(row[2]) != {-100}]
    drawn = torch.randint(len(usable), (40,), generator=torch.Generator().manual_seed(5)).tolist()
    batch = dataset.get_batch(B=40, generator=torch.Generator().manual_seed(5))
    for tensor, column in zip(batch, zip(*(usable[i] for i in drawn), strict=True), strict=True):
        assert tensor.tolist() == list(column)
    assert int(batch[2].max()) > 65_535


@pytest.mark.parametrize("eot", [-1, 2**32])
def test_padding_must_fit_the_dtype(tmp_path, sft, eot):
    for name in ("train_tokens.bin", "train_idx.npy"):
        shutil.copy(sft / name, tmp_path / name)
    (tmp_path / "meta.json").write_text(json.dumps({"token_dtype": "uint32-le"}))
    with pytest.raises(ValueError, match=rf"eot_id.*4294967295.*{eot}"):
        SFTExampleDataset(tmp_path / "train_tokens.bin", tmp_path / "train_idx.npy", T=T, device="cpu", eot_id=eot,
                          asst_id=1)  # fmt: skip


def test_splice_frames_equal_those_of_lists(pretrain):
    docs, S = [document_ids(text) for text in TEXTS[:4]], 32
    options = {"content_length": 20, "content_stride": 9, "offset_stride": 5, "pad_token_id": NULL}
    of_cache = MultiSpliceDocumentDataset.from_cache(pretrain, S=S, doc_indices=[0, 1, 2, 3], **options)
    of_lists = MultiSpliceDocumentDataset(S=S, doc_tokens_list=docs, eos_token_id=WIDE_IDS["eot"], **options)
    every = np.arange(len(of_lists))
    frames, wanted = of_cache.get_batch(every), of_lists.get_batch(every)
    assert frames.tokens.tolist() == wanted.tokens.tolist() and int(frames.tokens.max()) > 65_535
    packed, wanted_packed = (pack(ds, ds.spans(every)) for ds in (of_cache, of_lists))
    assert packed.tokens.tolist() == wanted_packed.tokens.tolist()
    tensors = to_tensors(packed)
    assert int(tensors.x.max()) > 65_535 and tensors.x.dtype == torch.int64


def test_an_id_that_is_negative_in_a_frame_is_past_the_vocabulary(pretrain):
    stream = TokenStream(pretrain / "train")
    stream.check_document(0, np.array([259_999], dtype=np.int32), 260_000)
    for ids in (np.array([2**32 - 5], dtype=np.uint32), np.array([-5], dtype=np.int32)):
        with pytest.raises(CacheError, match="4294967291"):
            stream.check_document(0, ids, 260_000)


def test_scores_do_not_depend_on_the_dtype():
    torch.manual_seed(0)
    model = GPT({"V": 70_000, "T": 8, "C": 8, "L": 1, "H": 2})
    ids = torch.randint(60_000, 70_000, (50,)).numpy()
    assert score_stream(model, ids.astype(np.uint32)) == score_stream(model, ids)


# --- builds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pretrain", "pretrain, shuffled", "sft"])
@pytest.mark.parametrize("when", [25, "meta.json"])
def test_a_killed_build_resumes(kind, when):
    case = dataclasses.replace(CASES[kind], make_tokenizer=WideTokenizer)
    with quick_folder() as path:
        case.build(path / "complete")
        assert exit_code(start(build_and_die, case, path / "killed", when)) == -signal.SIGKILL
        state = json.loads((path / ".killed.partial" / "state.json").read_text())
        assert sum(len(split["shards"]) for split in state["splits"].values()) > 0
        tokenizer = case.build(path / "killed")
        assert tree(path / "killed") == tree(path / "complete")
        if when == "meta.json":
            assert tokenizer.encoded == []  # nothing is encoded again


def test_another_dtype_does_not_resume(tmp_path):
    """A tokenizer of the same sha256 (none) and another vocabulary starts from the beginning."""
    case = CASES["pretrain"]
    assert exit_code(start(build_and_die, case, tmp_path / "c", "meta.json")) == -signal.SIGKILL
    case.build(tmp_path / "c", tokenizer=WideTokenizer())
    case.build(tmp_path / "wanted", tokenizer=WideTokenizer())
    assert tree(tmp_path / "c") == tree(tmp_path / "wanted")


@pytest.mark.parametrize(("free", "fits"), [(3999, False), (4000, True)])
def test_expected_tokens_take_four_bytes_each(tmp_path, monkeypatch, free, fits):
    monkeypatch.setattr(checks, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free)))
    options = {"tokenizer": WideTokenizer(), "expected_tokens": 1000}
    if fits:
        build_pretrain(TEXTS, tmp_path / "c", **options)
        return
    with pytest.raises(OSError, match=str(tmp_path / "c")) as caught:
        build_pretrain(TEXTS, tmp_path / "c", **options)
    assert caught.value.errno == errno.ENOSPC


def test_shards_hold_complete_tokens(tmp_path):
    with pytest.raises(ValueError, match=r"shard_bytes.*\b4\b.*34"):
        build_pretrain(TEXTS, tmp_path / "c", tokenizer=WideTokenizer(), shard_bytes=34)


class Batches(WideTokenizer):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = np.dtype(dtype)

    def encode_batch(self, texts):
        return [np.array(self.encode(text)).astype(self.dtype) for text in texts]


def test_batches_of_ids_must_not_be_narrower_than_the_vocabulary():
    for dtype in ("<u4", "<i8"):
        encoded = encoding.encode_texts(["abc"], Batches(dtype))
        assert encoded.tokens.dtype.str == "<u4" and encoded.tokens.tolist() == document_ids("abc")
    with pytest.raises(ValueError, match=r"encode_batch.*uint16.*uint32"):
        encoding.encode_texts(["abc"], Batches("<u2"))


# --- several caches ------------------------------------------------------------------------------------


def test_mixtures_of_both_dtypes_need_one_tokenizer(pretrain, tmp_path):
    narrow = build_pretrain(TEXTS, tmp_path / "narrow")
    datasets = {
        "wide": PretrainTokenStreamDataset(pretrain / "train", T=T, device="cpu"),
        "narrow": PretrainTokenStreamDataset(narrow / "train", T=8, device="cpu"),
    }
    shares = {"wide": 0.5, "narrow": 0.5}
    for hashes in ((None, None), ("ab" * 32, "cd" * 32), ("ab" * 32, None)):
        for dataset, sha256 in zip(datasets.values(), hashes, strict=True):
            dataset.meta["tokenizer_sha256"] = sha256
        with pytest.raises(ValueError, match=r"wide \(uint32-le.*narrow \(uint16-le"):
            Mixture(datasets, shares)
        Mixture(datasets, {"wide": 1.0, "narrow": 0.0})
    for dataset in datasets.values():
        dataset.meta["tokenizer_sha256"] = "ab" * 32
    assert Mixture(datasets, shares).plan(3, torch.Generator().manual_seed(0)).row


def test_differences_name_the_dtypes_and_compare_tokens(pretrain, tmp_path):
    narrow = build_pretrain(
        TEXTS, tmp_path / "narrow", val_texts=TEXTS[:9], max_val_tokens=10**6, shard_bytes=SHARD_BYTES
    )
    found = list(differences(pretrain, narrow))
    assert "token_dtype: 'uint32-le' and 'uint16-le'" in found
    assert "format_version: 2 and 1" in found
    assert any(f"train/shard_00000.bin: differ from token 0 on ({STREAM[0]} and {ord('n')})" in line for line in found)
    assert list(differences(pretrain, shutil.copytree(pretrain, tmp_path / "copy"))) == []


def test_a_cache_at_a_url(pretrain, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    url = "memory://wide-bucket/notes"
    remote.publish_cache(pretrain, url)
    try:
        dataset = PretrainTokenStreamDataset(f"{url}/train", T=T, device="cpu")
        assert dataset.gather([0, 300])[0].tolist() == [windows()[i][:-1] for i in (0, 300)]
        assert verify_cache(remote.local_folder(url))
    finally:
        fsspec.filesystem("memory").rm("/wide-bucket", recursive=True)


# --- commands and tasks --------------------------------------------------------------------------------


def test_commands_name_the_dtype(pretrain, sft, tmp_path, capsys):
    narrow = build_pretrain(TEXTS, tmp_path / "narrow")
    for path, dtype in ((pretrain, "uint32-le"), (sft, "uint32-le"), (narrow, "uint16-le")):
        with pytest.raises(SystemExit) as done:
            cli.main(["verify", str(path)])
        assert not done.value.code
        assert dtype in capsys.readouterr().out


class Named(WideTokenizer):
    """With the members that tasks and commands need."""

    sha256 = "ab" * 32

    def __init__(self, path=None):
        super().__init__()

    def render(self, ids):
        return " ".join(map(str, ids))

    @property
    def token_bytes(self):
        return [bytes((i // 1000,)) if i % 1000 == 7 else b"" for i in range(self.vocab_size)]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A folder of caches, read with `Named` where `load_tokenizer` is replaced."""
    root = tmp_path_factory.mktemp("caches")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "spm.model").touch()
    options = {"tokenizer": Named(), "max_val_tokens": 10**6, "val_texts": TEXTS[:9], "shard_bytes": SHARD_BYTES}
    build_pretrain(TEXTS, root / "pretrain" / "roam", **options)
    build_sft(TALKS, root / "sft" / "primer", tokenizer=Named())
    return root


def test_inspect_shows_a_sample(caches, capsys, monkeypatch):
    monkeypatch.setattr("niels_gpt.tokenizer.load_tokenizer", Named)
    with pytest.raises(SystemExit) as done:
        cli.main(["inspect", str(caches / "pretrain" / "roam"), "--json", "--seed", "1", "--tokens", "30"])
    assert not done.value.code
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["meta"]["token_dtype"] == "uint32-le"
    assert entry["ids"] == STREAM[entry["token"] : entry["token"] + 30] and max(entry["ids"]) > 65_535


TINY = ("model.V=260000", "model.C=8", "model.H=2", "model.L=1", f"model.T={T}", "train.B=3")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("pretrain", ("train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}")),
        ("sft", ("train.p_train={primer: 1.0}", "train.p_val={primer: 1.0}", "data.retain={roam: 1.0}")),
    ],
)
def test_tasks_train_and_evaluate(caches, monkeypatch, kind, overrides):
    monkeypatch.setattr(folder, "load_tokenizer", Named)
    config = small_config(kind, *TINY, *overrides, f"data.token_cache={caches}")
    task = open_task(config)
    batch = task.batch(0)
    assert int(batch.x.max()) > 65_535
    model = GPT(config.model)
    losses, _ = task.evaluate(model, "cpu")
    assert all(abs(loss - np.log(260_000)) < 0.1 for loss in losses.values())
    model.loss(batch.x, batch.targets).backward()
    if kind == "pretrain":
        shown = [list(map(int, row.text.split())) for row in task.origins(0)]
        assert shown == batch.x.tolist()
