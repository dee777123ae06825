"""Scores of a run on held-out streams and caches, against a loop over tokens and the standard compressors."""

import lzma
import math
from pathlib import Path

import pytest
import torch

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.training import score_run
from niels_gpt.training.score_run import ScoreOptions, score_byte_streams, score_token_caches
from tests import token_caches
from tests.cache import split_rule
from tests.token_caches import special, tokenizer
from tests.training import DELIMITER, small_config, write_texts

T = 16


def loaded(V=256, **options):
    torch.manual_seed(1)
    model = GPT({"V": V, "T": T, "C": 16, "L": 1, "H": 2, "dropout": 0.0}).eval()
    return LoadedRun(model, 5, Path("somewhere/best.pt"), None, **options)


def stream_nats(model, ids, stride):
    """Return the loss of every token but the first, in the first window that predicts it."""
    width = min(model.config.T, len(ids) - 1)
    starts = [s for s in range(0, len(ids), stride) if s + width < len(ids)] + [len(ids) - 1 - width]
    losses = {}
    for s in starts:
        for k, loss in enumerate(token_caches.nats(model, [ids[s : s + width]], [ids[s + 1 : s + width + 1]])):
            losses.setdefault(s + 1 + k, loss)
    return [losses[i] for i in range(1, len(ids))]


def check(score, losses, size):
    total = math.fsum(losses)
    assert (score["tokens"], score["bytes"]) == (len(losses), size)
    assert score["nats_per_token"] == pytest.approx(total / len(losses), rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(total / len(losses)), rel=1e-4)


def check_references(score, text, train, *, whole=True):
    assert score["uniform_bits"] == 8.0
    alone, both, before = (
        len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for data in (text, train + text, train)
    )
    bits = score["baselines"]["xz"]
    assert bits["alone"] == pytest.approx(8 * alone / len(text))
    assert bits["primed"] == pytest.approx(8 * (both - before) / len(text), abs=8 * 8 / len(text))
    assert (score["primed_bytes"], score["primed_whole"]) == (len(train), whole)
    long = [line.strip() for line in text.decode().split("\n") if len(line.strip()) >= 40]
    shared = [line for line in long if line in [each.strip() for each in train.decode().split("\n")]]
    share = sum(len(line.encode()) for line in shared) / max(sum(len(line.encode()) for line in long), 1)
    assert score["held_out_lines_in_training"] == pytest.approx(share)
    unigram = sum(-math.log2((train.count(byte) + 1) / (len(train) + 256)) for byte in text) / len(text)
    assert score["unigram_bits"] == pytest.approx(unigram)


# --- byte streams ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Notes and dialogues, a small wiki, and a file for sources of one's own."""
    folder = write_texts(tmp_path_factory.mktemp("scored"))
    (folder / "wiki").mkdir()
    for name in ("train", "validation"):
        (folder / "wiki" / f"{name}.txt").write_text(f"a row of {name}\nanother row\n" * 9, encoding="utf-8")
    (folder / "mine.txt").write_text("all of it is mine, and the end is held out. " * 40, encoding="utf-8")
    return folder


def split(items):
    """(train, held out)"""
    return tuple(split_rule(items, 0.1, 42).values())


@pytest.mark.parametrize(("stride", "limit"), [(None, None), (8, 101)])
def test_every_held_out_byte_of_the_built_in_sources(texts, stride, limit):
    run = loaded()
    config = small_config(texts, f"data.wiki={texts / 'wiki'}")  # draws from roam and primer: wiki is scored too
    scores = score_byte_streams(run, config, ScoreOptions(stride=stride, limit=limit))
    assert list(scores) == ["val_wiki", "val_roam", "val_chat"]
    notes = split([path.read_bytes() for path in sorted((texts / "notes").iterdir())])
    blocks = split((texts / "primer.txt").read_bytes().split(DELIMITER.encode()))
    rows = [[b"a row of train", b"another row"] * 9, [b"a row of validation", b"another row"] * 9]
    joined = {"val_wiki": (rows, b"\n\n"), "val_roam": (notes, b"\n\n"), "val_chat": (blocks, DELIMITER.encode())}
    for name, (parts, gap) in joined.items():
        train, val = (gap.join(part) for part in parts)
        val = val[:limit]
        check(scores[name], stream_nats(run.model, list(val), stride or T), len(val) - 1)
        check_references(scores[name], val, train)


def own_sources(texts, *overrides):
    sources = f"a: {{path: {texts / 'mine.txt'}, split: [0.5, 0.3, 0.2]}}, b: {{path: none}}, "
    sources += f"c: {{path: {texts / 'mine.txt'}, split: [0.8, 0.2]}}"
    shares = ["train.p_train={a: 1.0}", "train.p_val={c: 1.0}"]
    return load_config(overrides=[f"data.sources={{{sources}}}", f"data.cache_dir={texts / 'cache'}", *shares])


def test_own_sources_that_the_run_draws_from_and_no_others(texts):
    size = (texts / "mine.txt").stat().st_size
    scores = score_byte_streams(loaded(), own_sources(texts))
    assert {name: score["bytes"] for name, score in scores.items()} == {
        "val_a": int(0.3 * size) - 1,
        "val_c": int(0.2 * size) - 1,
    }
    test = score_byte_streams(loaded(), own_sources(texts), ScoreOptions("test"))
    assert {name: score["bytes"] for name, score in test.items()} == {"test_a": int(0.2 * size) - 1}


def test_built_in_sources_can_be_asked_for(texts, monkeypatch):
    seen = []
    monkeypatch.setattr(score_run, "load_streams", lambda config, *, T: seen.append(config.enabled_sources) or {})
    assert score_byte_streams(loaded(), own_sources(texts), built_in=True) == {}
    assert seen[-1] == ("wiki", "roam", "primer", "a", "c")
    score_byte_streams(loaded(), RunConfig())
    assert seen[-1] == ("wiki", "roam", "primer")


def test_no_source_has_a_test_part(texts):
    with pytest.raises(ValueError, match=r"somewhere/best\.pt.*test.*data\.sources\.NAME\.split"):
        score_byte_streams(loaded(), small_config(texts), ScoreOptions("test"))


# --- token caches ------------------------------------------------------------------------------------


def text_bytes(ids):
    """Return the text itself, without special tokens."""
    ends = {special(name) for name in ("sys", "usr", "asst", "eot")}
    return b"".join(tokenizer().token_bytes[i] for i in ids if i not in ends)


def caches(root=None):
    return CacheFolder(root or token_caches.folder())


@pytest.fixture
def run():
    return loaded(404, tokenizer=tokenizer())


@pytest.mark.parametrize(("stride", "limit", "reference"), [(None, None, 5_000_000), (5, 90, 70)])
def test_every_held_out_token_of_the_pretrain_caches(run, monkeypatch, stride, limit, reference):
    monkeypatch.setattr(score_run, "REFERENCE_TOKENS", reference)
    scores = score_token_caches(run, RunConfig(), caches(), ScoreOptions(stride=stride, limit=limit))
    assert list(scores) == ["val_fineweb_edu", "val_roam"]  # not tuned for chat
    for name in token_caches.PRETRAIN:
        ids = token_caches.stream(name, "val")[:limit]
        check(scores[f"val_{name}"], stream_nats(run.model, ids, stride or T), len(text_bytes(ids[1:])))
        train = token_caches.stream(name)[:reference]
        check_references(scores[f"val_{name}"], text_bytes(ids), text_bytes(train), whole=reference > 70)


@pytest.mark.parametrize("batch", [2, 32])
def test_a_chat_model_is_also_scored_on_replies(run, monkeypatch, batch):
    monkeypatch.setattr(score_run, "EXAMPLES_PER_BATCH", batch)
    scores = score_token_caches(run, load_config(overrides=["task=sft"]), caches(), ScoreOptions(limit=2))
    replies = [f"val_{name} (replies)" for name in ("dolly15k", "oasst1", "chat")]
    assert list(scores) == ["val_fineweb_edu", "val_roam", *replies]
    assert scores["val_roam"]["tokens"] == 1
    for name in token_caches.SFT:
        losses, scored = [], []
        for ids in token_caches.examples(name, "val"):
            x, targets = token_caches.sft_row(ids, T)
            losses += token_caches.nats(run.model, [x], [targets])
            scored += [target for target in targets if target != -100]
        name = "chat" if name == "primer" else name
        check(scores[f"val_{name} (replies)"], losses, len(text_bytes(scored)))


def test_a_cache_with_nothing_held_out_is_skipped(run, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    token_caches.build_sft(root, "one", tokenizer(), token_caches.chats("primer")[:1])
    scores = score_token_caches(run, load_config(overrides=["task=sft"]), caches(root), ScoreOptions(limit=2))
    assert "val_one (replies)" not in scores


def test_the_test_splits_and_nothing_else(run, tmp_path):
    for task in ("pretrain", "sft"):
        with pytest.raises(ValueError, match=r"test.*niels-gpt cache build wikitext --test"):
            score_token_caches(run, load_config(overrides=[f"task={task}"]), caches(), ScoreOptions("test"))
    root = token_caches.copy_to(tmp_path / "caches")
    texts = token_caches.documents("roam")
    splits = {"val_texts": texts[4:6], "test_texts": texts[6:]}
    limits = {"max_train_tokens": 1 << 40, "max_val_tokens": 1 << 40, "shard_bytes": 200}
    options = {"tokenizer": tokenizer(), "seed": 1, "shuffle_buffer": None}
    build_pretrain_cache(texts[:4], root / "pretrain" / "wikitext", **splits, **limits, **options)
    options = ScoreOptions("test", stride=8)
    scores = score_token_caches(run, load_config(overrides=["task=sft"]), caches(root), options)
    ids = [i for text in texts[6:] for i in [*tokenizer().encode(text), special("eot")]]
    assert list(scores) == ["test_wikitext"]
    check(scores["test_wikitext"], stream_nats(run.model, ids, 8), len(text_bytes(ids[1:])))


def test_caches_of_another_tokenizer(run, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    other = token_caches.other_tokenizer()
    token_caches.build_pretrain(root, "roam", other)
    with pytest.raises(ValueError, match=r"roam.*tokenizer"):
        score_token_caches(run, RunConfig(), caches(root), ScoreOptions(limit=10))
    (root / "tokenizer/spm.model").write_bytes(other.model)
    (root / "tokenizer/meta.json").unlink()
    with pytest.raises(ValueError, match=r"caches.*tokenizer.*somewhere/best\.pt"):
        score_token_caches(run, RunConfig(), caches(root))


@pytest.mark.parametrize(
    ("file", "token"), [("pretrain/roam/val/shard_00000.bin", 404), ("pretrain/roam/train/shard_00000.bin", 65535)]
)
def test_ids_past_the_vocabulary(run, tmp_path, file, token):
    root = token_caches.copy_to(tmp_path / "cache")
    data = bytearray((root / file).read_bytes())
    data[6:8] = token.to_bytes(2, "little")
    (root / file).write_bytes(data)
    with pytest.raises(ValueError, match="differ from their checksum"):
        score_token_caches(run, RunConfig(), caches(root))
    token_caches.forget_checksums("pretrain", "roam", root)
    with pytest.raises(ValueError, match=rf"(?s){(root / file).parent}.*{token}|{token}.*{(root / file).parent}"):
        score_token_caches(run, RunConfig(), caches(root))
