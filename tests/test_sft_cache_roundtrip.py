"""Acceptance: a cache is read back: uint16 tokens, valid offsets, and the sequences of the tokenizer."""

import itertools

import numpy as np
import pytest

from tests.cache import ByteTokenizer, build_sft, chat_ids, real_tokenizer, split_rule

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
tokenizers = pytest.mark.parametrize("make", [ByteTokenizer, real_tokenizer])


def sequences(tokens, starts):
    """The tokens split at the offsets."""
    return [tokens[a:b] for a, b in itertools.pairwise([*starts, len(tokens)])]


@tokenizers
def test_sft_files(tmp_path, make):
    tokenizer = make()
    build_sft(EXAMPLES, tmp_path / "c", tokenizer=tokenizer)
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
