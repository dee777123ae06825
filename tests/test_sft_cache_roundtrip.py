"""Acceptance: a cache is read back: uint16 tokens, valid offsets, and the sequences of the tokenizer."""

import itertools

import numpy as np
import pytest
import torch

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta, sha256_file
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from tests.cache import ByteTokenizer, chat_ids, real_tokenizer, split_rule

EXAMPLES = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "é ß\r\n"},
        {"role": "assistant", "content": "\t日本 😀"},
    ],
    [{"role": "assistant", "content": " leading and trailing "}],
    [{"role": "user", "content": "▁ low block"}, {"role": "assistant", "content": "\ufeffbom\x00nul"}],
    *([{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i} " * i}] for i in range(1, 20)),
]
TEXTS = ["hello", "é ß", "a\nb", "▁ low block", "日本 😀\x00", *(f"document {i} " * i for i in range(1, 30))]
tokenizers = pytest.mark.parametrize("make", [ByteTokenizer, real_tokenizer])


def sequences(tokens, starts):
    """The tokens split at the offsets."""
    return [tokens[a:b] for a, b in itertools.pairwise([*starts, len(tokens)])]


@tokenizers
def test_sft_files(tmp_path, make):
    tokenizer = make()
    build_sft_cache(EXAMPLES, str(tmp_path / "c"), tokenizer=tokenizer, val_frac=0.25, seed=42, dataset_name="mine")
    splits = split_rule(EXAMPLES, 0.25, 42)
    assert (len(splits["train"]), len(splits["val"])) == (18, 5)
    for split, examples in splits.items():
        path = tmp_path / "c" / f"{split}_tokens.bin"
        tokens = np.fromfile(path, dtype="<u2")
        starts = np.load(tmp_path / "c" / f"{split}_idx.npy", allow_pickle=False)
        assert path.stat().st_size == 2 * len(tokens)
        assert tokens.max() < tokenizer.vocab_size
        assert starts.dtype == np.int64
        assert starts.shape == (len(examples),)
        assert starts[0] == 0
        assert (np.diff(starts) > 0).all()
        assert starts[-1] < len(tokens)
        found = sequences(tokens.tolist(), starts.tolist())
        assert found == [chat_ids(example, tokenizer) for example in examples]
        assert [messages(ids, tokenizer) for ids in found] == examples


def messages(ids, tokenizer):
    """Decode ids to messages."""
    special = tokenizer.special_token_ids()
    roles = {special["sys"]: "system", special["usr"]: "user", special["asst"]: "assistant"}
    found, at = [], 0
    while at < len(ids):
        end = ids.index(special["eot"], at)
        found.append({"role": roles[ids[at]], "content": tokenizer.decode(ids[at + 1 : end])})
        at = end + 1
    return found


@tokenizers
def test_sft_dataset(tmp_path, make):
    tokenizer = make()
    build_sft_cache(EXAMPLES, str(tmp_path / "c"), tokenizer=tokenizer, val_frac=0.25, seed=42)
    eot = tokenizer.special_token_ids()["eot"]
    for split, examples in split_rule(EXAMPLES, 0.25, 42).items():
        paths = str(tmp_path / "c" / f"{split}_tokens.bin"), str(tmp_path / "c" / f"{split}_idx.npy")
        data = SFTExampleDataset(*paths, T=300, device="cpu", eot_id=eot)
        assert (data.num_examples, data.num_excluded) == (len(examples), 0)
        x, y, _ = data.get_batch(B=500, generator=torch.Generator().manual_seed(0))
        rows = {tuple(row) for row in torch.cat((x, y[:, -1:]), dim=1).tolist()}
        wanted = [chat_ids(example, tokenizer) for example in examples]
        assert rows == {tuple(ids + [eot] * (301 - len(ids))) for ids in wanted}


@tokenizers
def test_pretrain_files(tmp_path, make):
    tokenizer = make()
    build_pretrain_cache(
        TEXTS,
        str(tmp_path / "c"),
        tokenizer=tokenizer,
        max_train_tokens=1 << 40,
        max_val_tokens=60,
        shard_bytes=400,
        seed=42,
        shuffle_buffer=None,
    )
    eot = tokenizer.special_token_ids()["eot"]
    found = []
    for split in ("val", "train"):
        paths = sorted((tmp_path / "c" / split).glob("shard_*.bin"))
        shards = [np.fromfile(path, dtype="<u2") for path in paths]
        assert all(path.stat().st_size == 400 for path in paths[:-1])
        tokens = np.concatenate(shards)
        starts = np.load(tmp_path / "c" / split / "documents.npy", allow_pickle=False)
        assert starts.dtype == np.int64
        assert starts[0] == 0
        assert (np.diff(starts) > 0).all()
        assert starts[-1] < len(tokens)
        found += sequences(tokens.tolist(), starts.tolist())
        dataset = PretrainTokenStreamDataset(str(tmp_path / "c" / split), T=1, device="cpu", verify=True)
        assert dataset.num_tokens == len(tokens)
    wanted = [[*tokenizer.encode(text), eot] for text in TEXTS]
    cut = [i for i, (ids, full) in enumerate(zip(found, wanted, strict=True)) if ids != full]
    assert len(cut) <= 1  # the document that fills the val budget
    for i in cut:
        assert found[i] == wanted[i][: len(found[i])]
    assert [tokenizer.decode(ids[:-1]) for i, ids in enumerate(found) if i not in cut] == [
        text for i, text in enumerate(TEXTS) if i not in cut
    ]


@tokenizers
def test_meta_describes_the_files(tmp_path, make):
    tokenizer = make()
    build_sft_cache(EXAMPLES, str(tmp_path / "c"), tokenizer=tokenizer, val_frac=0.25, seed=42, dataset_name="mine")
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    assert (meta["dataset_name"], meta["seed"], meta["token_dtype"]) == ("mine", 42, "uint16-le")
    assert (meta["train_examples"], meta["val_examples"]) == (18, 5)
    assert meta["vocab_size"] == tokenizer.vocab_size
    assert meta["special_token_ids"] == tokenizer.special_token_ids()
    for name in ("train_tokens.bin", "train_idx.npy", "val_tokens.bin", "val_idx.npy"):
        assert meta["files"][name]["sha256"] == sha256_file(str(tmp_path / "c" / name))
