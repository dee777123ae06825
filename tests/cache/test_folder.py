import json
import shutil
from pathlib import Path

import pytest
import torch

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.meta import CacheError
from niels_gpt.cache.writing.partial_build import PartialBuild
from niels_gpt.tokenizer import train_tokenizer
from tests.cache import UNLIMITED, chat_ids, conversations, meta_of, no_waiting, real_tokenizer

TEXTS = [f"a note {i} that the model reads again and again, and so on" for i in range(30)]
HELD_OUT = [f"a held-out note {i} that it never reads" for i in range(5)]


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def pretrain(folder, texts=TEXTS, val_texts=HELD_OUT, **changes):
    options = {
        "tokenizer": real_tokenizer(),
        "max_train_tokens": UNLIMITED,
        "max_val_tokens": UNLIMITED,
        "shard_bytes": 400,
        "seed": 1,
        "shuffle_buffer": None,
        "val_texts": val_texts,
    }
    build_pretrain_cache(texts, folder, **{**options, **changes})


def sft(folder, examples=conversations(20), **changes):
    build_sft_cache(examples, folder, **{"tokenizer": real_tokenizer(), "val_frac": 0.2, "seed": 1, **changes})


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A folder of caches; tests that change it use `copied`."""
    root = tmp_path_factory.mktemp("made") / "cache"
    (root / "tokenizer").mkdir(parents=True)
    (root / "tokenizer" / "spm.model").write_bytes(real_tokenizer().model)
    with no_waiting():
        pretrain(root / "pretrain" / "notes")
        pretrain(root / "pretrain" / "books", ["a book " * 50])
        sft(root / "sft" / "talk")
    stub = root / "pretrain" / "gutenberg"
    (stub / "train").mkdir(parents=True)
    (stub / "meta.json").write_text('{"built": false, "dataset_name": "gutenberg", "reason": "no Hub"}', "utf-8")
    return root


@pytest.fixture
def copied(caches, tmp_path):
    return Path(shutil.copytree(caches, tmp_path / "cache"))


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    return Path(train_tokenizer(TEXTS, tmp_path_factory.mktemp("other"), vocab_size=290))


# --- names -------------------------------------------------------------------------------------------


def test_tokenizer_and_names(caches):
    folder = CacheFolder(caches)
    assert folder.tokenizer.sha256 == real_tokenizer().sha256
    assert folder.names("pretrain") == ["books", "notes"]
    assert folder.names("sft") == ["talk"]
    assert CacheFolder(str(caches)).names("sft") == ["talk"]


def test_home_is_expanded(caches, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(caches.parent))
    assert CacheFolder("~/cache").names("sft") == ["talk"]


@pytest.mark.parametrize("what", ["nowhere", "an empty folder", "a file", "a folder without tokenizer"])
def test_missing_folder_or_tokenizer_raises(copied, tmp_path, what):
    folder = {"a folder without tokenizer": copied}.get(what, tmp_path / what)
    if what == "an empty folder":
        folder.mkdir()
    elif what == "a file":
        folder.write_text("x", "utf-8")
    elif folder == copied:
        (copied / "tokenizer" / "spm.model").unlink()
    with pytest.raises(CacheError) as caught:
        CacheFolder(folder)
    message = str(caught.value)
    assert str(folder) in message and "spm.model" in message
    assert f"niels-gpt cache build-all --cache-dir {folder}" in message and "data.token_cache" in message
    assert "\n" not in message


def test_damaged_tokenizer_is_named(copied):
    model = copied / "tokenizer" / "spm.model"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"tokenizer/spm\.model"):
        CacheFolder(copied)


def test_missing_cache_lists_remedies(caches):
    folder = CacheFolder(caches)
    folder.check("pretrain", ["notes", "books"], option="train.p_train")
    folder.check("pretrain", [], option="train.p_train")
    with pytest.raises(CacheError) as caught:
        folder.check("pretrain", ["notes", "web", "radio"], option="train.p_train")
    message = str(caught.value)
    assert "pretrain cache web, radio" in message and "books, notes" in message
    assert f"niels-gpt cache build web radio --cache-dir {caches}" in message
    assert "train.p_train" in message and "talk" not in message
    with pytest.raises(CacheError, match=r"sft cache notes.*talk"):
        folder.check("sft", ["notes"], option="train.p_train")


def test_placeholder_is_not_a_cache(caches):
    folder = CacheFolder(caches)
    with pytest.raises(CacheError, match="gutenberg"):
        folder.check("pretrain", ["gutenberg"], option="train.p_train")
    with pytest.raises(CacheError, match=r"gutenberg.*not built.*no Hub"):
        folder.pretrain("gutenberg", "train", T=4)


def test_no_caches(copied):
    shutil.rmtree(copied / "sft")
    folder = CacheFolder(copied)
    assert folder.names("sft") == []
    with pytest.raises(CacheError, match="none"):
        folder.check("sft", ["talk"], option="train.p_train")


def test_killed_build_is_not_a_cache(copied, monkeypatch):
    """Not even right before publishing, when the hidden folder has all files and meta.json."""

    def die(build, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialBuild, "publish", die)
    with pytest.raises(KeyboardInterrupt):
        pretrain(copied / "pretrain" / "web")
    with pytest.raises(KeyboardInterrupt):
        sft(copied / "sft" / "dolly15k")
    assert list(copied.glob("pretrain/.*/meta.json"))  # the premise of this test
    folder = CacheFolder(copied)
    assert folder.names("pretrain") == ["books", "notes"]
    assert folder.names("sft") == ["talk"]


def test_folder_without_meta_is_not_a_cache(copied):
    (copied / "pretrain" / "bare" / "train").mkdir(parents=True)
    (copied / "pretrain" / "books" / "meta.json").unlink()
    assert CacheFolder(copied).names("pretrain") == ["notes"]
    with pytest.raises(CacheError, match="books"):
        CacheFolder(copied).pretrain("books", "train", T=4)


# --- datasets ----------------------------------------------------------------------------------------


def test_pretrain_windows(caches):
    folder = CacheFolder(caches)
    for split, texts in (("train", TEXTS), ("val", HELD_OUT)):
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
def test_cache_of_another_tokenizer_raises(copied, other_tokenizer, kind):
    shutil.copy(other_tokenizer, copied / "tokenizer" / "spm.model")
    folder = CacheFolder(copied)
    with pytest.raises(CacheError, match=r"another tokenizer.*build it again") as caught:
        folder.pretrain("notes", "train", T=8) if kind == "pretrain" else folder.sft("talk", "train", T=8)
    assert real_tokenizer().sha256[:12] in str(caught.value) and folder.tokenizer.sha256[:12] in str(caught.value)
    assert str(copied / kind) in str(caught.value)


@pytest.mark.parametrize("file", ["pretrain/notes/train/shard_00001.bin", "sft/talk/train_tokens.bin"])
def test_verify_finds_a_damaged_file(copied, file):
    path = copied / file
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    folder = CacheFolder(copied)

    def opened(verify):
        if file.startswith("sft"):
            return folder.sft("talk", "train", T=64, verify=verify)
        return folder.pretrain("notes", "train", T=8, verify=verify)

    assert opened(False)
    with pytest.raises(CacheError, match=path.name):
        opened(True)


# --- fingerprints ------------------------------------------------------------------------------------


def fingerprints(root):
    folder = CacheFolder(root)
    return {(kind, name): folder.fingerprint(kind, name) for kind in ("pretrain", "sft") for name in folder.names(kind)}


def test_fingerprints_differ(caches):
    found = fingerprints(caches)
    assert len(found) == 3 and len(set(found.values())) == 3
    assert all(len(value) == 64 and int(value, 16) for value in found.values())


def test_fingerprint_depends_only_on_tokens(caches, copied):
    before = fingerprints(caches)
    assert fingerprints(copied) == before
    pretrain(copied / "pretrain" / "again", dataset_name="again", workers=3)
    sft(copied / "sft" / "again", workers=3)
    folder = CacheFolder(copied)
    assert folder.fingerprint("pretrain", "again") == before["pretrain", "notes"]
    assert folder.fingerprint("sft", "again") == before["sft", "talk"]


def test_fingerprint_ignores_held_out_text(copied):
    before = fingerprints(copied)
    pretrain(copied / "pretrain" / "notes", val_texts=[*HELD_OUT, "one more"])
    examples = [list(example) for example in conversations(20)]
    train_before = (copied / "sft" / "talk" / "train_tokens.bin").read_bytes()
    kept = [example for example in examples if example]
    held_out = torch.randperm(len(kept), generator=torch.Generator().manual_seed(1)).tolist()[: int(len(kept) * 0.2)]
    kept[held_out[0]][-1]["content"] += " or not"
    val_before = (copied / "sft" / "talk" / "val_tokens.bin").read_bytes()
    sft(copied / "sft" / "talk", kept)
    assert (copied / "sft" / "talk" / "train_tokens.bin").read_bytes() == train_before
    assert (copied / "sft" / "talk" / "val_tokens.bin").read_bytes() != val_before
    assert fingerprints(copied) == before


@pytest.mark.parametrize("change", ["one more", "one less", "one token", "order", "shards"])
def test_fingerprint_changes_with_the_training_files(copied, change):
    before = fingerprints(copied)
    texts = list(TEXTS)
    if change == "one more":
        texts.append("one more")
    elif change == "one less":
        texts.pop(7)
    elif change == "one token":
        texts[29] = texts[29].replace("so on", "so no")
    elif change == "order":
        texts[3], texts[4] = texts[4], texts[3]
    pretrain(copied / "pretrain" / "notes", texts, shard_bytes=600 if change == "shards" else 400)
    after = fingerprints(copied)
    assert after["pretrain", "notes"] != before["pretrain", "notes"]
    assert after["pretrain", "books"] == before["pretrain", "books"]
    assert after["sft", "talk"] == before["sft", "talk"]


@pytest.mark.parametrize("changes", [{"val_frac": 0.3}, {"seed": 2}])
def test_fingerprint_changes_with_the_split(copied, changes):
    before = fingerprints(copied)
    sft(copied / "sft" / "talk", **changes)
    after = fingerprints(copied)
    assert after.pop(("sft", "talk")) != before.pop(("sft", "talk"))
    assert after == before


def test_fingerprint_ignores_other_metadata(copied):
    before = fingerprints(copied)
    for path in (copied / "pretrain" / "notes" / "meta.json", copied / "sft" / "talk" / "meta.json"):
        meta = meta_of(path.parent) | {"dataset_name": "other", "revision": "abc", "seed": 99}
        path.write_text(json.dumps(dict(reversed(meta.items()))), "utf-8")
    assert fingerprints(copied) == before


def test_fingerprint_of_a_missing_cache_raises(caches):
    with pytest.raises(CacheError, match="radio"):
        CacheFolder(caches).fingerprint("pretrain", "radio")
