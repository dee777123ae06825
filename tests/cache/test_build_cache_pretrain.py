import getpass
import itertools
import json
import platform
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import TrainEmpty, _shuffle, build_pretrain_cache
from tests.cache import (
    EOT,
    IDS,
    SPECIAL_STRINGS,
    UNLIMITED,
    ByteTokenizer,
    check_listing,
    check_pretrain,
    digests,
    expected_pretrain,
    meta_of,
    no_waiting,
    quick_folder,
    read_offsets,
    read_tokens,
    small_steps,
    tree,
)

SHARD_BYTES = 32


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def build(texts, out_dir, **changes):
    """A build with small shards and no budgets."""
    options = {
        "tokenizer": ByteTokenizer(),
        "max_train_tokens": UNLIMITED,
        "max_val_tokens": 0,
        "shard_bytes": SHARD_BYTES,
        "seed": 42,
        "shuffle_buffer": None,
    }
    build_pretrain_cache(texts, str(out_dir), **{**options, **changes})


def stream_of(folder, split="train"):
    return [token for path in sorted((folder / split).glob("shard_*.bin")) for token in read_tokens(path)]


def documents_of(folder, split="train"):
    """The texts of a cache without cut documents."""
    stream = stream_of(folder, split)
    assert not stream or stream[-1] == EOT
    texts, at = [], 0
    for i, token in enumerate(stream):
        if token == EOT:
            texts.append(bytes(stream[at:i]).decode())
            at = i + 1
    return texts


def is_empty(folder):
    """No cache and no hidden folder."""
    return list(folder.iterdir()) == []


# --- against the reference ---------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from("ab\r\né😀"), max_size=12)
ODD = st.sampled_from(["", None, 7, b"bytes", "\ud800x", *SPECIAL_STRINGS, f"a {SPECIAL_STRINGS[3]} b"])
DOCUMENTS = st.lists(TEXTS | TEXTS | ODD, max_size=25)
BUDGETS = st.integers(0, 60) | st.just(UNLIMITED)


@settings(max_examples=80)
@given(
    texts=DOCUMENTS,
    val_texts=st.none() | DOCUMENTS,
    max_train_tokens=BUDGETS,
    max_val_tokens=BUDGETS,
    shard_bytes=st.integers(1, 12).map(lambda n: 2 * n) | st.just(1 << 20),
    batch_items=st.integers(1, 5),
    workers=st.integers(1, 3),
    one_shot=st.booleans(),
)
def test_every_file_equals_the_reference(
    texts, val_texts, max_train_tokens, max_val_tokens, shard_bytes, batch_items, workers, one_shot
):
    budgets = {"max_train_tokens": max_train_tokens, "max_val_tokens": max_val_tokens}
    expected = expected_pretrain(texts, val_texts=val_texts, **budgets)
    wrap = iter if one_shot else list
    with quick_folder() as root, small_steps(batch_items=batch_items):
        folder = root / "cache"
        options = {
            "val_texts": None if val_texts is None else wrap(val_texts),
            "shard_bytes": shard_bytes,
            "workers": workers,
            **budgets,
        }
        if expected.streams["train"]:
            build(wrap(texts), folder, **options)
            check_pretrain(folder, expected, shard_bytes)
            assert [path.name for path in folder.parent.iterdir()] == ["cache"]
        else:
            with pytest.raises(ValueError, match="train would be empty"):
                build(wrap(texts), folder, **options)
            assert is_empty(folder.parent)


def test_pretrain_cache_by_hand(tmp_path):
    """Budgets of 6 and 9 tokens, shards of 4 tokens."""
    texts = ["ab", "cdef", "gh", "", "ijk", "lmnop", "never read"]
    build(texts, tmp_path / "c", max_val_tokens=6, max_train_tokens=9, shard_bytes=8)
    a = ord("a")
    assert stream_of(tmp_path / "c", "val") == [a, a + 1, EOT, a + 2, a + 3, a + 4]
    assert read_offsets(tmp_path / "c" / "val" / "documents.npy") == [0, 3]
    assert stream_of(tmp_path / "c") == [a + 6, a + 7, EOT, a + 8, a + 9, a + 10, EOT, a + 11, a + 12]
    assert read_offsets(tmp_path / "c" / "train" / "documents.npy") == [0, 3, 7]
    sizes = {name: len(data) for name, data in tree(tmp_path / "c").items() if name.endswith(".bin")}
    assert sizes == {
        "train/shard_00000.bin": 8,
        "train/shard_00001.bin": 8,
        "train/shard_00002.bin": 2,
        "val/shard_00000.bin": 8,
        "val/shard_00001.bin": 4,
    }
    meta = meta_of(tmp_path / "c")
    assert (meta["train_tokens"], meta["val_tokens"]) == (9, 6)
    assert (meta["train_documents"], meta["val_documents"]) == (3, 2)
    assert meta["inputs"]["texts"]["items"] == 6
    assert sum(meta["dropped"].values()) == 1


def test_budget_that_ends_with_a_document(tmp_path):
    build(["abc", "def", "ghi"], tmp_path / "c", max_val_tokens=4, max_train_tokens=4)
    assert documents_of(tmp_path / "c", "val") == ["abc"]
    assert documents_of(tmp_path / "c") == ["def"]


def test_document_longer_than_many_shards(tmp_path):
    text = "0123456789" * 50
    build(["x", text, "y"], tmp_path / "c", max_val_tokens=2, shard_bytes=20)
    assert documents_of(tmp_path / "c") == [text, "y"]
    assert read_offsets(tmp_path / "c" / "train" / "documents.npy") == [0, 501]
    assert len(list((tmp_path / "c" / "train").glob("shard_*.bin"))) == 51


def test_endless_input_stops_when_train_is_full(tmp_path):
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield f"document {i}"

    with small_steps(batch_items=2):
        build(endless(), tmp_path / "c", max_train_tokens=500, max_val_tokens=100, workers=2)
    texts = [f"document {i}" for i in range(1000)]
    check_pretrain(
        tmp_path / "c", expected_pretrain(texts, max_train_tokens=500, max_val_tokens=100), shard_bytes=SHARD_BYTES
    )
    assert len(read) < 100  # a few items are read ahead


# --- dropped documents -------------------------------------------------------------------------------


def test_dropped_documents_are_counted_and_logged(tmp_path, caplog):
    bad = [*SPECIAL_STRINGS, "a\ud83d", None, 3.5, "", ""]
    build(["good", *bad, "fine"], tmp_path / "c")
    assert documents_of(tmp_path / "c") == ["good", "fine"]
    dropped = meta_of(tmp_path / "c")["dropped"]
    assert sorted(dropped.values()) == [2, 3, 4]
    logged = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(logged) == 1
    assert "9 documents" in logged[0]
    assert all(f"{number} {reason}" in logged[0] for reason, number in dropped.items())


def test_white_space_is_text(tmp_path):
    build([" ", "\n", "\r\n"], tmp_path / "c")
    assert documents_of(tmp_path / "c") == [" ", "\n", "\n"]


def test_items_of_other_types_are_dropped(tmp_path):
    odd = [
        {"text": "a"},
        {1: "a", "b": 2},
        {None: "x", "text": "y"},
        {("a",): 1},
        [1],
        object(),
        {1, 2},
        np.zeros(3),
        ...,
    ]
    build(["good", *odd], tmp_path / "c")
    assert documents_of(tmp_path / "c") == ["good"]
    assert sum(meta_of(tmp_path / "c")["dropped"].values()) == len(odd)


# --- shuffling ---------------------------------------------------------------------------------------


@given(number=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 2**63 - 1))
def test_shuffle_permutes_within_its_buffer(number, size, seed):
    texts = [f"{i}" for i in range(number)]
    order = [int(text) for text in _shuffle(texts, size, seed)]
    assert sorted(order) == list(range(number))
    assert all(original <= position + size for position, original in enumerate(order))
    if size <= 1:
        assert order == list(range(number))


def test_buffer_of_0_does_not_shuffle(tmp_path):
    texts = [f"{i}" for i in range(30)]
    for n, buffer in enumerate((None, 0)):
        build(texts, tmp_path / str(n), shuffle_buffer=buffer)
        assert documents_of(tmp_path / str(n)) == texts
    assert digests(tmp_path / "0") == digests(tmp_path / "1")


def test_every_order_is_equally_likely():
    """Three documents in a buffer of three: six orders, chi-square with five degrees of freedom."""
    seen = Counter()
    for seed in range(300):
        seen["".join(_shuffle(["a", "b", "c"], 3, seed))] += 1
    assert len(seen) == 6
    assert sum((count - 50) ** 2 / 50 for count in seen.values()) < 20.5  # one in a thousand


def test_small_buffer_mixes():
    """A document stays k positions on average in a buffer of size k. More than 4096 draws: they come in blocks."""
    number, size = 9000, 20
    order = list(_shuffle(range(number), size, 7))
    assert sorted(order) == list(range(number))
    delays = [position + size - original for position, original in enumerate(order[: number - 500])]
    assert min(delays) >= 1
    assert 18 < np.mean(delays) < 22  # geometric with mean 20, 8,500 draws


def test_budgets_apply_to_the_shuffled_order(tmp_path):
    texts = [f"document {i}" for i in range(50)]
    build(texts, tmp_path / "all", shuffle_buffer=16)
    order = documents_of(tmp_path / "all")
    budgets = {"max_train_tokens": 200, "max_val_tokens": 100}
    build(texts, tmp_path / "c", shuffle_buffer=16, **budgets)
    check_pretrain(tmp_path / "c", expected_pretrain(order, **budgets), SHARD_BYTES)


def test_val_texts_are_shuffled_separately(tmp_path):
    texts, val_texts = [f"t{i}" for i in range(30)], [f"v{i}" for i in range(30)]
    build(texts, tmp_path / "c", shuffle_buffer=30, val_texts=val_texts, max_val_tokens=UNLIMITED)
    train, val = documents_of(tmp_path / "c"), documents_of(tmp_path / "c", "val")
    assert sorted(train) == sorted(texts)
    assert sorted(val) == sorted(val_texts)
    assert val != val_texts
    assert [text[1:] for text in train] != [text[1:] for text in val]  # different permutations


# --- val_texts ---------------------------------------------------------------------------------------


def test_val_texts_go_to_val_and_texts_to_train(tmp_path):
    build(["a", "b"], tmp_path / "c", val_texts=["x", "", "y"], max_val_tokens=UNLIMITED)
    assert documents_of(tmp_path / "c") == ["a", "b"]
    assert documents_of(tmp_path / "c", "val") == ["x", "y"]
    meta = meta_of(tmp_path / "c")
    assert meta["inputs"]["texts"]["items"] == 2
    assert meta["inputs"]["val_texts"]["items"] == 3
    assert sum(meta["dropped"].values()) == 1


@pytest.mark.parametrize("val_texts", [[], ["", None]])
def test_empty_val_texts(tmp_path, val_texts):
    build(["a"], tmp_path / "c", val_texts=val_texts, max_val_tokens=10)
    assert documents_of(tmp_path / "c") == ["a"]
    assert stream_of(tmp_path / "c", "val") == []
    assert meta_of(tmp_path / "c")["val_tokens"] == 0


def test_split_rule_is_recorded(tmp_path):
    build(["a", "b"], tmp_path / "a", max_val_tokens=2)
    build(["a", "b"], tmp_path / "b", val_texts=["b"], max_val_tokens=2)
    rules = [meta_of(tmp_path / name)["split_rule"] for name in "ab"]
    assert rules[0] != rules[1]
    assert all("cut" in rule and "EOT" in rule for rule in rules)


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"shard_bytes": 3}, "shard_bytes.*3"),
        ({"shard_bytes": 1}, "shard_bytes.*1"),
        ({"shard_bytes": 0}, "shard_bytes.*0"),
        ({"shard_bytes": -2}, "shard_bytes.*-2"),
        ({"max_train_tokens": -1}, "max_train_tokens.*-1"),
        ({"max_val_tokens": -1}, "max_val_tokens.*-1"),
        ({"seed": -1}, "seed.*-1"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"seed": None}, "seed.*None"),
        ({"seed": "42"}, "seed.*'42'"),
        ({"seed": True}, "seed.*True"),
        ({"shuffle_buffer": -1}, "shuffle_buffer.*-1"),
        ({"workers": 0}, "workers.*0"),
        ({"workers": -3}, "workers.*-3"),
        ({"max_train_tokens": 0}, "train would be empty.*max_train_tokens=0"),
        ({"max_train_tokens": 0, "max_val_tokens": 3}, "train would be empty"),
    ],
)
def test_invalid_numbers_are_named(tmp_path, changes, wanted):
    with pytest.raises(ValueError, match=wanted):
        build(["abc", "def"], tmp_path / "c", **changes)
    assert is_empty(tmp_path)


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 5}])
def test_string_instead_of_a_list_raises(tmp_path, options):
    for texts, more in (("abc", {}), (["abc"], {"val_texts": "abc", "max_val_tokens": 3})):
        with pytest.raises(ValueError, match="one string"):
            build(texts, tmp_path / "c", **options, **more)
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("texts", "options", "reason", "budget"),
    [
        ([], {}, "0 documents", ""),
        (["", ""], {}, "2 documents were read, 2 ", ""),
        ([None, SPECIAL_STRINGS[0]], {}, "2 documents were read, 1 .*1 ", ""),
        (["abc"], {"max_val_tokens": 4}, "4 tokens.*max_val_tokens=4", "val"),
        (["abc", "def"], {"max_val_tokens": 100}, "8 tokens.*max_val_tokens=100", "val"),
        ([], {"val_texts": ["abc"], "max_val_tokens": 100}, "4 tokens", ""),
        (["abc"], {"max_train_tokens": 0}, "max_train_tokens=0", "train"),
    ],
)
def test_empty_train_split_raises_with_the_reason(tmp_path, texts, options, reason, budget):
    with pytest.raises(TrainEmpty, match=f"c: train would be empty: .*{reason}") as caught:
        build(texts, tmp_path / "c", **options)
    assert caught.value.budget == budget
    assert is_empty(tmp_path)
    build(["abc"], tmp_path / "c")  # the next build succeeds
    assert documents_of(tmp_path / "c") == ["abc"]


# --- meta --------------------------------------------------------------------------------------------


def test_meta_has_the_fields_of_the_spec(tmp_path):
    build(
        ["abc", "", "def", "ghi"],
        tmp_path / "c",
        max_val_tokens=4,
        shuffle_buffer=None,
        seed=7,
        dataset_name="fineweb_edu",
        dataset_config="CC-MAIN-2024-10",
        revision="0123abc",
        streaming=True,
    )
    meta = meta_of(tmp_path / "c")
    assert (
        meta.items()
        >= {
            "dataset_name": "fineweb_edu",
            "dataset_config": "CC-MAIN-2024-10",
            "revision": "0123abc",
            "streaming": True,
            "seed": 7,
            "token_dtype": "uint16-le",
            "tokenizer_sha256": None,
            "vocab_size": 260,
            "special_token_ids": IDS,
            "train_tokens": 8,
            "val_tokens": 4,
            "train_documents": 2,
            "val_documents": 1,
            "shard_bytes": SHARD_BYTES,
            "max_val_tokens": 4,
            "shuffle_buffer": 0,
            "format_version": 1,
        }.items()
    )
    assert meta["split_rule"]
    check_listing(tmp_path / "c")


def test_meta_has_no_path_host_user_or_time(tmp_path):
    for name in ("one", "another"):
        build(["abc", "def"], tmp_path / name, max_val_tokens=3)
    text = (tmp_path / "one" / "meta.json").read_text(encoding="utf-8")
    assert text == (tmp_path / "another" / "meta.json").read_text(encoding="utf-8")
    values = json.dumps(list(_leaves(json.loads(text))))
    assert str(tmp_path) not in text
    for secret in (platform.node(), getpass.getuser(), str(Path.home())):
        assert f'"{secret}"' not in values
        assert secret == "/" or f"{secret}/" not in values
    assert not re.search(r"20\d\d-\d\d-\d\d|\d\d:\d\d", values)


def _leaves(value):
    if isinstance(value, dict):
        yield from (leaf for key, inner in value.items() for leaf in [key, *_leaves(inner)])
    elif isinstance(value, list):
        yield from (leaf for inner in value for leaf in _leaves(inner))
    else:
        yield value


# --- output folder -----------------------------------------------------------------------------------


def test_relative_and_unusual_folder_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (Path("c"), Path("a b/é [1] *?"), Path("x/../y"), Path("./z/")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x").mkdir(exist_ok=True)
        build(["abc"], folder)
        assert documents_of(folder) == ["abc"]


def test_existing_cache_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "c"
    build([f"old {i}" for i in range(100)], folder, max_val_tokens=100)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "other").mkdir()
    (folder / "other" / "shard_00000.bin").write_bytes(b"mine")
    build(["new a", "new b"], folder, max_val_tokens=6)
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (folder / "other" / "shard_00000.bin").read_bytes() == b"mine"
    (folder / "notes.txt").unlink()
    (folder / "other" / "shard_00000.bin").unlink()
    (folder / "other").rmdir()
    check_pretrain(
        folder, expected_pretrain(["new a", "new b"], max_train_tokens=UNLIMITED, max_val_tokens=6), SHARD_BYTES
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("texts", [[], ["a", None]])
def test_failed_build_keeps_the_existing_cache(tmp_path, texts):
    build(["old"], tmp_path / "c")
    before = digests(tmp_path / "c")
    with pytest.raises(ValueError, match="empty"):
        build(texts, tmp_path / "c", max_val_tokens=100)
    assert digests(tmp_path / "c") == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_caches_in_one_folder_do_not_interfere(tmp_path):
    """One is built while the input of the other is read."""

    def texts():
        yield "outer a"
        build(["inner"], tmp_path / "inner")
        yield "outer b"

    build(texts(), tmp_path / "outer")
    assert documents_of(tmp_path / "inner") == ["inner"]
    assert documents_of(tmp_path / "outer") == ["outer a", "outer b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "outer"]
