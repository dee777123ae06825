import json
import os
import shlex
import shutil

import pytest
import torch

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.writing.partial_build import PartialBuild
from niels_gpt.system import files
from tests.cache import HELD_OUT, NOTES, chat_ids, conversations, meta_of, notes_cache, real_tokenizer, talk_cache

# --- names -------------------------------------------------------------------------------------------


def test_tokenizer_and_names(caches):
    folder = CacheFolder(caches)
    assert folder.tokenizer.sha256 == real_tokenizer().sha256
    assert folder.names("pretrain") == ["books", "notes"]
    assert folder.names("sft") == ["talk"]
    assert CacheFolder(str(caches)).names("sft") == ["talk"]


def test_folder_in_the_home_folder(caches, monkeypatch):
    monkeypatch.setenv("HOME", str(caches.parent))
    assert CacheFolder(f"~/{caches.name}").names("sft") == ["talk"]


@pytest.mark.parametrize("what", ["nowhere", "an empty folder", "a file", "a folder without tokenizer"])
def test_missing_folder_or_tokenizer_raises(cache, tmp_path, what):
    folder = {"a folder without tokenizer": cache}.get(what, tmp_path / what)
    if what == "an empty folder":
        folder.mkdir()
    elif what == "a file":
        folder.write_text("x", "utf-8")
    elif folder == cache:
        (cache / "tokenizer" / "spm.model").unlink()
    with pytest.raises(CacheError) as caught:
        CacheFolder(folder)
    message = str(caught.value)
    assert str(folder) in message and "spm.model" in message
    assert (
        f"niels-gpt cache build-all --cache-dir {shlex.quote(str(folder))}" in message and "data.token_cache" in message
    )
    assert "\n" not in message


def test_damaged_tokenizer_is_named(cache):
    model = cache / "tokenizer" / "spm.model"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"tokenizer/spm\.model"):
        CacheFolder(cache)


def test_missing_cache_lists_remedies(cache):
    folder = CacheFolder(cache)
    folder.check("pretrain", ["notes", "books"], option="train.p_train")
    folder.check("pretrain", [], option="train.p_train")
    with pytest.raises(CacheError) as caught:
        folder.check("pretrain", ["notes", "web", "radio"], option="train.p_train")
    message = str(caught.value)
    assert "pretrain cache web, radio" in message and "books, notes" in message
    assert f"niels-gpt cache build web radio --cache-dir {cache}" in message
    assert "train.p_train" in message and "talk" not in message
    with pytest.raises(CacheError, match=r"sft cache notes.*talk"):
        folder.check("sft", ["notes"], option="train.p_train")
    shutil.rmtree(cache / "sft")
    assert CacheFolder(cache).names("sft") == []
    with pytest.raises(CacheError, match="none"):
        CacheFolder(cache).check("sft", ["talk"], option="train.p_train")


def test_placeholder_is_not_a_cache(caches):
    folder = CacheFolder(caches)
    with pytest.raises(CacheError, match="gutenberg"):
        folder.check("pretrain", ["gutenberg"], option="train.p_train")
    with pytest.raises(CacheError, match=r"gutenberg.*not built.*no Hub"):
        folder.pretrain("gutenberg", "train", T=4)


def test_killed_build_is_not_a_cache(cache, monkeypatch):
    """Not even right before publishing, when the hidden folder has all files and meta.json."""

    def die(build, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialBuild, "publish", die)
    with pytest.raises(KeyboardInterrupt):
        notes_cache(cache / "pretrain" / "web")
    with pytest.raises(KeyboardInterrupt):
        talk_cache(cache / "sft" / "dolly15k")
    assert list(cache.glob("pretrain/.*/meta.json"))  # the premise of this test
    (cache / "pretrain" / "bare" / "train").mkdir(parents=True)  # without a meta.json
    folder = CacheFolder(cache)
    assert folder.names("pretrain") == ["books", "notes"]
    assert folder.names("sft") == ["talk"]


# --- datasets ----------------------------------------------------------------------------------------


def test_pretrain_windows(caches):
    folder = CacheFolder(caches)
    for split, texts in (("train", NOTES), ("val", HELD_OUT)):
        dataset = folder.pretrain("notes", split, T=20)
        eot = real_tokenizer().special_token_ids()["eot"]
        stream = [token for text in texts for token in (*real_tokenizer().encode(text), eot)]
        assert dataset.num_tokens == len(stream)
        x, y = dataset.gather([0])
        assert x[0].tolist() + y[0, -1:].tolist() == stream[:21]
        assert x.device.type == "cpu"


def test_sft_examples(caches):
    dataset = CacheFolder(caches).sft("talk", "train", T=64)
    wanted = [chat_ids(example, real_tokenizer()) for example in conversations(20) if example]
    found = [dataset.example(i).tolist() for i in range(dataset.num_examples)]
    assert len(found) == 15 and all(example in wanted for example in found)
    assert CacheFolder(caches).sft("talk", "val", T=64).num_examples == 3
    special = real_tokenizer().special_token_ids()
    x, y, masked = dataset.gather([0])
    first = x[0].tolist()
    begin = first.index(special["asst"])
    assert masked[0, :begin].eq(-100).all() and masked[0, begin] == y[0, begin] == first[begin + 1]


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_cache_of_another_tokenizer_raises(cache, other_tokenizer, kind):
    (cache / "tokenizer" / "spm.model").write_bytes(other_tokenizer.model)
    (cache / "tokenizer" / "meta.json").unlink()
    folder = CacheFolder(cache)
    with pytest.raises(CacheError, match=r"another tokenizer.*build it again") as caught:
        folder.pretrain("notes", "train", T=8) if kind == "pretrain" else folder.sft("talk", "train", T=8)
    assert real_tokenizer().sha256[:12] in str(caught.value) and folder.tokenizer.sha256[:12] in str(caught.value)
    assert str(cache / kind) in str(caught.value)


# --- fingerprints ------------------------------------------------------------------------------------


def fingerprints(root):
    folder = CacheFolder(root)
    opened = {("pretrain", name): folder.pretrain(name, "train", T=8) for name in folder.names("pretrain")}
    opened |= {("sft", name): folder.sft(name, "train", T=8) for name in folder.names("sft")}
    return {name: dataset.fingerprint() for name, dataset in opened.items()}


def test_fingerprint_depends_only_on_tokens(caches, cache):
    before = fingerprints(caches)
    assert len(set(before.values())) == 3 and all(len(value) == 64 and int(value, 16) for value in before.values())
    notes_cache(cache / "pretrain" / "again", dataset_name="again", workers=3)
    talk_cache(cache / "sft" / "again", workers=3)
    for path in (cache / "pretrain" / "notes" / "meta.json", cache / "sft" / "talk" / "meta.json"):
        meta = meta_of(path.parent) | {"dataset_name": "other", "revision": "abc", "seed": 99}
        path.write_text(json.dumps(dict(reversed(meta.items()))), "utf-8")
    after = fingerprints(cache)
    assert after.items() >= before.items()
    assert after["pretrain", "again"] == before["pretrain", "notes"]
    assert after["sft", "again"] == before["sft", "talk"]


def test_fingerprint_ignores_held_out_text(cache):
    before = fingerprints(cache)
    notes_cache(cache / "pretrain" / "notes", val_texts=[*HELD_OUT, "one more"])
    examples = [list(example) for example in conversations(20)]
    train_before = (cache / "sft" / "talk" / "train_tokens.bin").read_bytes()
    kept = [example for example in examples if example]
    held_out = torch.randperm(len(kept), generator=torch.Generator().manual_seed(1)).tolist()[: int(len(kept) * 0.2)]
    kept[held_out[0]][-1]["content"] += " or not"
    val_before = (cache / "sft" / "talk" / "val_tokens.bin").read_bytes()
    talk_cache(cache / "sft" / "talk", kept)
    assert (cache / "sft" / "talk" / "train_tokens.bin").read_bytes() == train_before
    assert (cache / "sft" / "talk" / "val_tokens.bin").read_bytes() != val_before
    assert fingerprints(cache) == before


@pytest.mark.parametrize("change", ["one token", "order", "shards"])
def test_fingerprint_changes_with_the_training_files(cache, change):
    before = fingerprints(cache)
    texts = list(NOTES)
    if change == "one token":
        texts[19] = texts[19].replace("the model", "the loss")
    elif change == "order":
        texts[3], texts[4] = texts[4], texts[3]
    notes_cache(cache / "pretrain" / "notes", texts, shard_bytes=300 if change == "shards" else 200)
    after = fingerprints(cache)
    assert after["pretrain", "notes"] != before["pretrain", "notes"]
    assert after["pretrain", "books"] == before["pretrain", "books"]
    assert after["sft", "talk"] == before["sft", "talk"]


# --- permissions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "private", ["pretrain/notes/train/shard_00001.bin", "pretrain/notes", "sft/talk/train_idx.npy"]
)
def test_files_derived_from_a_private_cache_are_private(cache, tmp_path, private):
    old = os.umask(0o022)
    try:
        folder = CacheFolder(cache)
        folder.pretrain("notes", "train", T=8), folder.sft("talk", "train", T=8)
        assert mode_of_new_file(tmp_path / "public") == 0o644
        (cache / private).chmod(0o700 if (cache / private).is_dir() else 0o600)
        folder.pretrain("notes", "train", T=8), folder.sft("talk", "train", T=8)
        assert mode_of_new_file(tmp_path / "private") == 0o600
    finally:
        os.umask(old)


def test_private_umask_gives_a_private_cache(tmp_path):
    old = os.umask(0o077)
    try:
        folder = notes_cache(tmp_path / "c")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}


def mode_of_new_file(path):
    files.write_text(path, "derived")
    return path.stat().st_mode & 0o777
