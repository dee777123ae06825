"""Acceptance: only the assistant's tokens and the EOT that ends them are targets."""

import itertools

import numpy as np
import pytest
import torch

from niels_gpt.cache.sft_dataset import SFTExampleDataset
from tests.cache import build_sft, conversations, real_tokenizer, write_tokens

SYS, USR, ASST, EOT, A, B = 256, 257, 258, 259, 65, 66
HAND_MADE = [SYS, 1, 2, EOT, USR, 3, 4, 5, EOT, ASST, A, B, EOT]


def dataset(folder, examples, T, **changes):
    lengths = [len(example) for example in examples]
    write_tokens(folder / "train_tokens.bin", list(itertools.chain(*examples)))
    np.save(folder / "train_idx.npy", np.array([0, *itertools.accumulate(lengths)][:-1], dtype=np.int64))
    options = {"T": T, "device": "cpu", "eot_id": EOT, "asst_id": ASST, **changes}
    return SFTExampleDataset(str(folder / "train_tokens.bin"), str(folder / "train_idx.npy"), **options)


def one(folder, example, T):
    x, y, masked = dataset(folder, [example], T).get_batch(B=1, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == masked.shape == (1, T)
    assert x.dtype == y.dtype == masked.dtype == torch.int64
    return x[0].tolist(), y[0].tolist(), masked[0].tolist()


def test_sequence_of_the_spec(tmp_path):
    x, y, masked = one(tmp_path, HAND_MADE, T=12)
    assert x == HAND_MADE[:-1]
    assert y == HAND_MADE[1:]
    assert masked == [-100] * 9 + [A, B, EOT]


def test_padded_example(tmp_path):
    x, y, masked = one(tmp_path, HAND_MADE, T=20)
    assert x == HAND_MADE + [EOT] * 7
    assert y == HAND_MADE[1:] + [EOT] * 8
    assert masked == [-100] * 9 + [A, B, EOT] + [-100] * 8


@pytest.mark.parametrize(("T", "targets"), [(11, [A, B]), (10, [A])])
def test_truncated_example(tmp_path, T, targets):
    x, y, masked = one(tmp_path, HAND_MADE, T=T)
    assert x == HAND_MADE[:T]
    assert y == HAND_MADE[1 : T + 1]
    assert masked == [-100] * 9 + targets


def test_truncated_before_the_first_target(tmp_path):
    """The example has no target and is excluded; another one is drawn."""
    with pytest.raises(ValueError, match="1 examples"):
        dataset(tmp_path, [HAND_MADE], T=9)
    two = dataset(tmp_path, [HAND_MADE, [ASST, A, EOT]], T=9)
    assert two.num_excluded == 1
    x, _, masked = two.get_batch(B=50, generator=torch.Generator().manual_seed(0))
    assert (x[:, 0] == ASST).all()
    assert (masked != -100).any(dim=1).all()


def test_targets_of_a_cache_are_the_replies(tmp_path):
    """From messages to targets and back to text; the assistant id comes from the meta."""
    tokenizer, examples = real_tokenizer(), [example for example in conversations(20) if example]
    folder = build_sft(examples, tmp_path / "c", tokenizer=tokenizer, val_frac=0.1)
    eot = tokenizer.special_token_ids()["eot"]
    found = []
    for split in ("train", "val"):
        paths = folder / f"{split}_tokens.bin", folder / f"{split}_idx.npy"
        data = SFTExampleDataset(*paths, T=256, device="cpu", eot_id=eot)
        for row in data.gather(list(range(data.num_examples)))[2].tolist():
            targets = [token for token in row if token != -100]
            bounds = [0, *(i + 1 for i, token in enumerate(targets) if token == eot)]
            assert bounds[-1] == len(targets)
            found.append([tokenizer.decode(targets[a : b - 1]) for a, b in itertools.pairwise(bounds)])
    replies = [[m["content"] for m in example if m["role"] == "assistant"] for example in examples]
    assert sorted(found) == sorted(replies)
