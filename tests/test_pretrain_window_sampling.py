"""Acceptance: windows are slices of a shard, y is x shifted by one token, and ids are within the vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from tests.cache import ByteTokenizer, build_pretrain, read_tokens, real_tokenizer

TEXTS = [f"the note {i} reads and writes é again " * (i % 6 + 1) for i in range(120)]


@pytest.fixture(scope="module", params=[ByteTokenizer, real_tokenizer])
def cache(tmp_path_factory, request):
    tokenizer = request.param()
    folder = tmp_path_factory.mktemp("pretrain") / "cache"
    budgets = {"max_train_tokens": 3000, "max_val_tokens": 500}
    build_pretrain(TEXTS, folder, tokenizer=tokenizer, shard_bytes=1024, shuffle_buffer=10, **budgets)
    return folder, tokenizer.vocab_size


def shards_of(folder):
    return [read_tokens(path) for path in sorted(folder.glob("shard_*.bin"))]


@settings(max_examples=40)
@given(split=st.sampled_from(["train", "val"]), T=st.integers(1, 300), B=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_windows_are_slices_of_shards(cache, split, T, B, seed):
    folder, vocab = cache
    dataset = PretrainTokenStreamDataset(str(folder / split), T=T, device="cpu")
    x, y = dataset.get_batch(B=B, generator=torch.Generator().manual_seed(seed))
    assert x.shape == y.shape == (B, T)
    assert x.dtype == y.dtype == torch.int64
    assert (y[:, :-1] == x[:, 1:]).all()
    assert int(torch.stack((x, y)).min()) >= 0
    assert int(torch.stack((x, y)).max()) < vocab
    long_enough = [tokens for tokens in shards_of(folder / split) if len(tokens) > T]
    for row in torch.cat((x, y[:, -1:]), dim=1).numpy().astype("<u2"):
        needle = row.tobytes()
        assert any(found(needle, np.array(tokens, dtype="<u2").tobytes()) for tokens in long_enough)


def found(needle, data):
    """Whether a shard contains the tokens: at an even byte offset."""
    at = data.find(needle)
    while at > 0 and at % 2:
        at = data.find(needle, at + 1)
    return at >= 0


@pytest.mark.parametrize(("T", "batches"), [(1, 40), (511, 1)])
def test_every_window_of_the_train_split_is_drawn(cache, T, batches):
    """Including both ends of every shard."""
    folder, _ = cache
    dataset = PretrainTokenStreamDataset(str(folder / "train"), T=T, device="cpu")
    shards = shards_of(folder / "train")
    assert [len(shard) for shard in shards] == [512, 512, 512, 512, 512, 440]
    assert dataset.num_windows == sum(max(len(shard) - T, 0) for shard in shards)
    with pytest.raises(ValueError, match="512"):
        PretrainTokenStreamDataset(str(folder / "train"), T=512, device="cpu")
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(batches):
        x, y = dataset.get_batch(B=1000, generator=generator)
        seen |= {tuple(row) for row in torch.cat((x, y[:, -1:]), dim=1).tolist()}
    assert seen == {tuple(s[i : i + T + 1]) for s in shards for i in range(len(s) - T)}
