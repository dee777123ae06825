"""The test split of a pretrain cache: build, verify, inspect and remove it."""

import json
from pathlib import Path

import datasets
import pytest

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.cache.verify import verify_cache
from tests.cache import (
    EOT,
    UNLIMITED,
    ByteTokenizer,
    build_pretrain,
    check_listing,
    meta_of,
    read_offsets,
    small_steps,
    stream_of,
    tree,
)
from tests.cli import call, error_of

LINES = {
    "train": [f"a line of train, {i}" for i in range(30)],
    "validation": ["held out", "", "and more"],
    "test": [f"to test on {i}\n" for i in range(9)],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)


def build(out_dir="c", **changes):
    options = {"max_val_tokens": UNLIMITED, "val_texts": ["val"], "test_texts": LINES["test"], "workers": 1}
    with small_steps():
        return build_pretrain(["train"], out_dir, **{**options, **changes})


# --- the builder -------------------------------------------------------------------------------------


def test_test_texts_have_no_budget():
    folder = build(max_train_tokens=3, max_val_tokens=2)  # the budgets of the other splits
    wanted, starts = [], []
    for text in LINES["test"]:
        starts.append(len(wanted))
        wanted += [*text.encode(), EOT]
    assert stream_of(folder, "test") == wanted
    assert read_offsets(folder / "test" / "documents.npy") == starts
    meta = meta_of(folder)
    assert (meta["test_tokens"], meta["test_documents"]) == (len(wanted), len(LINES["test"]))
    assert meta["inputs"]["test_texts"]["items"] == len(LINES["test"])
    check_listing(folder)
    stream = TokenStream(folder / "test")
    assert bytes(stream.document(3)[:-1].tolist()).decode() == LINES["test"][3]


def test_other_splits_do_not_change():
    with_it, without = tree(build("a")), tree(build("b", test_texts=None))
    assert {name for name in with_it if name not in without} == {name for name in with_it if name.startswith("test/")}
    for name in without.keys() - {"meta.json"}:
        assert with_it[name] == without[name]
    assert "test_tokens" not in meta_of(Path("b"))


def test_test_texts_need_val_texts():
    with pytest.raises(ValueError, match=r"test_texts.*val_texts"):
        build(val_texts=None)
    assert not Path("c").exists()


def test_rebuild_without_test_texts_removes_the_split():
    folder = build()
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    build(test_texts=None)
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "notes.txt", "train", "val"]
    assert verify_cache(folder) == [folder]


def test_interrupted_build_resumes_in_the_test_split():
    texts = [f"to test on {i}" for i in range(100)]
    complete = tree(build("complete", test_texts=texts))

    def breaking():
        yield from texts[:90]
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        build("c", test_texts=breaking())
    assert not Path("c").exists()
    assert list(Path(".c.partial/test").glob("shard_*.bin"))
    tokenizer = ByteTokenizer()
    build("c", tokenizer=tokenizer, test_texts=texts)
    assert tree(Path("c")) == complete
    assert texts[0] not in tokenizer.encoded and texts[-1] in tokenizer.encoded


# --- verify ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "count"])
def test_verify_finds_damage(damage):
    folder = build()
    assert verify_cache(folder) == [folder]
    if damage == "flipped":
        shard = folder / "test" / "shard_00001.bin"
        shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    else:
        meta = meta_of(folder)
        (folder / "meta.json").write_text(json.dumps({**meta, "test_tokens": 5}), encoding="utf-8")
    with pytest.raises(CacheError, match="test"):
        verify_cache(folder)


# --- wikitext ----------------------------------------------------------------------------------------


def write_wikitext(splits=tuple(LINES)):
    for split in splits:
        rows = [{"text": text} for text in LINES[split]]
        datasets.Dataset.from_list(rows).to_parquet(f"wikitext/{split}.parquet")
    return ["--path", "wikitext", "--vocab-size", 300]


def test_wikitext_test_split(capsys):
    options = write_wikitext()
    folder = Path("cache/pretrain/wikitext")
    assert call("cache", "build", "wikitext", *options) == 0  # only on request: the spec lists the files
    assert not (folder / "test").exists()
    capsys.readouterr()
    for state in ("built", "up to date"):
        assert call("cache", "build", "wikitext", *options, "--test") == 0
        output = capsys.readouterr().out
        row = next(line for line in output.splitlines() if line.startswith("wikitext"))
        assert f" {state} " in row and row.count("tokens") == 3
        assert meta_of(folder)["test_documents"] == len(LINES["test"])
    assert call("cache", "inspect", folder, "--split", "test", "--tokens", 1000, "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["text"].count("to test on") == len(LINES["test"])
    assert call("cache", "verify", "cache") == 0
    assert call("cache", "build", "wikitext", *options) == 0
    assert not (folder / "test").exists()
    capsys.readouterr()
    assert call("cache", "inspect", folder, "--split", "test") == 1
    assert "no test split" in error_of(capsys)
