"""Caches of tokenizers of others: documents, masks of replies, refusals, installation."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.sources.build import install_tokenizer
from niels_gpt.cache.verify import verify_cache
from niels_gpt.tokenizer import load_tokenizer, write_foreign
from tests import chat_templates as templates
from tests import foreign_tokenizers as made

CHATS = [
    [
        {"role": "user", "content": f"Question {number}: <|im_end|> </s> what?"},
        {"role": "assistant", "content": "It is " + "so " * number},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": f"Then {number} more."},
    ]
    for number in range(20)
]
STYLES = [("smollm", templates.CHATML), ("llama2", templates.LLAMA2), ("llama2", templates.ZEPHYR),
          ("llama3", templates.LLAMA3), ("sentencepiece", templates.LLAMA2), ("llama2", None)]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def tokenizer_of(name, tmp_path, template=None, **config):
    change = {} if template is None else {"chat_template": template}
    return load_tokenizer(made.make(name, tmp_path / "theirs", **change, **config))


@pytest.mark.parametrize(("name", "template"), STYLES)
def test_targets_are_the_replies_with_their_ends(name, template, tmp_path, folder):
    tokenizer = tokenizer_of(name, tmp_path, template)
    write_foreign(tokenizer, folder / "tokenizer")
    build_sft_cache(CHATS, folder / "sft" / "talk", tokenizer=tokenizer, val_frac=0.2, seed=1)
    dataset = CacheFolder(folder).sft("talk", "train", T=400)
    assert dataset.num_examples == 16
    assert dataset.num_excluded == 0
    seen = set()
    for number in range(dataset.num_examples):
        ids, mask = dataset.example(number).tolist(), dataset.mask(number)
        text = tokenizer.decode([i for i, target in zip(ids, mask, strict=True) if target])
        ends = [i for i, target in zip(ids, mask, strict=True) if target and i in dataset.reply_ends]
        assert len(ends) == 2
        first, second = text.split(tokenizer.decode(ends[:1]))[:2]
        assert first.strip().startswith("It is")
        assert second.strip().startswith("Then")
        assert "Question" not in text
        assert "And then" not in text
        seen.add(second.strip())
    assert len(seen) == 16
    _, y, masked = dataset.get_batch(B=4, generator=torch.Generator().manual_seed(0))
    assert (masked[masked >= 0] == y[masked >= 0]).all()
    assert (masked >= 0).any(dim=1).all()
    assert verify_cache(folder / "sft" / "talk")


def test_masks_equal_those_of_transformers(tmp_path, folder):
    tokenizer = tokenizer_of("smollm", tmp_path, templates.CHATML_WITH_GENERATION)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    chats = [[{**m, "content": m["content"].replace("<|im_end|>", "")} for m in chat] for chat in CHATS]
    build_sft_cache(chats, folder, tokenizer=tokenizer, val_frac=0.0, seed=1)
    special = tokenizer.special_token_ids()
    dataset = SFTExampleDataset(
        folder / "train_tokens.bin", folder / "train_idx.npy", T=500, device="cpu", eot_id=special["eot"]
    )
    for number, chat in enumerate(chats):
        expected = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True)
        assert dataset.example(number).tolist() == expected["input_ids"]
        assert dataset.mask(number).tolist() == [bool(i) for i in expected["assistant_masks"]]


def test_a_start_across_two_examples_opens_no_reply(tmp_path, folder):
    """The last ids of one example and the first of the next are no sequence."""
    tokenizer = tokenizer_of("smollm", tmp_path, templates.CHATML)
    build_sft_cache(CHATS[:2], folder, tokenizer=tokenizer, val_frac=0.0, seed=1)
    meta_start = json.loads((folder / "meta.json").read_text())["reply_start"]
    tokens = np.fromfile(folder / "train_tokens.bin", dtype="<u2")
    half = len(meta_start) // 2
    tokens = np.concatenate((tokens[:5], meta_start[:half], meta_start[half:], tokens[5:9], meta_start, [7, 402]))
    tokens.astype("<u2").tofile(folder / "bare_tokens.bin")
    np.save(folder / "bare_idx.npy", np.array([0, 5 + half]))
    (folder / "plain").mkdir()
    for name in ("bare_tokens.bin", "bare_idx.npy"):
        (folder / name).rename(folder / "plain" / name)
    (folder / "plain" / "meta.json").write_text(json.dumps({"reply_start": meta_start, "reply_ends": [402]}))
    dataset = SFTExampleDataset(
        folder / "plain" / "bare_tokens.bin", folder / "plain" / "bare_idx.npy", T=100, device="cpu", eot_id=402
    )
    assert dataset.usable.tolist() == [1]
    assert dataset.mask(1).tolist() == [False] * (len(dataset.example(1)) - 2) + [True, True]


@pytest.mark.parametrize("name", ["smollm", "llama3", "llama2", "sentencepiece"])
def test_documents_begin_and_end_as_transformers_writes_them(name, tmp_path, folder):
    tokenizer = tokenizer_of(name, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    texts = ["The dog sleeps.", "<s>struck</s> out <|im_end|>", "", "In 1984\r\nthe garden"]
    build_pretrain_cache(
        texts, folder, tokenizer=tokenizer, max_train_tokens=10_000, max_val_tokens=0, shard_bytes=1 << 20, seed=0,
        shuffle_buffer=None,
    )  # fmt: skip
    tokens = np.fromfile(folder / "train" / "shard_00000.bin", dtype="<u2").tolist()
    end = theirs.eos_token_id
    expected = [*theirs(texts[0])["input_ids"], end]
    assert tokens[: len(expected)] == expected
    last = [*theirs("In 1984\nthe garden")["input_ids"], end]
    assert tokens[-len(last) :] == last
    between = tokens[len(expected) : -len(last)]
    body = between[len(tokenizer.document_start) : -1]
    assert set(body).isdisjoint(tokenizer.special_token_ids().values())
    assert tokenizer.decode(body) == texts[1]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["tokenizer_sha256"] == tokenizer.sha256
    assert meta["special_token_ids"] == {"eot": end}
    PretrainTokenStreamDataset(folder / "train", T=8, device="cpu", tokenizer_sha256=tokenizer.sha256)


def test_a_template_that_cannot_be_masked_is_refused_before_any_work(tmp_path, folder):
    tokenizer = tokenizer_of("smollm", tmp_path, templates.STRIPS_OLD_THOUGHTS)
    with pytest.raises(ValueError, match="<think>"):
        build_sft_cache(CHATS, folder, tokenizer=tokenizer, val_frac=0.0, seed=1)
    assert not (folder / "meta.json").exists()


def test_conversations_that_the_template_refuses_are_counted(tmp_path, folder):
    tokenizer = tokenizer_of("smollm", tmp_path, templates.GEMMA)
    chats = [*CHATS, [{"role": "system", "content": "x"}, *CHATS[0]]]
    build_sft_cache(chats, folder, tokenizer=tokenizer, val_frac=0.0, seed=1)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["dropped"] == {"that the chat template refuses": 1}
    assert meta["train_examples"] == len(CHATS)


@pytest.mark.parametrize("change", [{"reply_start": []}, {"reply_ends": "x"}, {"reply_start": [1.5]}])
def test_damaged_marks(change, tmp_path):
    np.array([1, 2, 3], dtype="<u2").tofile(tmp_path / "train_tokens.bin")
    np.save(tmp_path / "train_idx.npy", np.array([0]))
    (tmp_path / "meta.json").write_text(json.dumps({"reply_start": [1], "reply_ends": [3]} | change))
    with pytest.raises(CacheError, match=next(iter(change))):
        SFTExampleDataset(tmp_path / "train_tokens.bin", tmp_path / "train_idx.npy", T=8, device="cpu", eot_id=3)


def test_installed_once(tmp_path, folder):
    theirs = made.make("smollm", tmp_path / "theirs")
    other = made.make("smollm", tmp_path / "other", chat_template="x")
    installed = install_tokenizer(theirs, folder)
    assert install_tokenizer(theirs / "tokenizer.json", folder).sha256 == installed.sha256
    assert load_tokenizer(folder / "tokenizer").sha256 == installed.sha256
    with pytest.raises(ValueError, match="already has another tokenizer"):
        install_tokenizer(other, folder)
