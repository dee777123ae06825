import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import TrainEmpty, _shuffle
from tests.cache import (
    BYTES_META,
    EOT,
    SPECIAL_STRINGS,
    UNLIMITED,
    build_pretrain,
    check_listing,
    check_pretrain,
    digests,
    expected_pretrain,
    meta_of,
    quick_folder,
    read_offsets,
    small_steps,
    stream_of,
    tree,
)


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
@example(["ab", "", "cd"], [], 3, UNLIMITED, 1 << 20, 3, 1, False)  # the budget ends with an item; more follow
@example(["ab", ""], [], 3, UNLIMITED, 1 << 20, 3, 1, False)
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
            build_pretrain(wrap(texts), folder, **options)
            check_pretrain(folder, expected, shard_bytes)
            assert [path.name for path in folder.parent.iterdir()] == ["cache"]
        else:
            with pytest.raises(ValueError, match="train would be empty"):
                build_pretrain(wrap(texts), folder, **options)
            assert is_empty(folder.parent)


def test_pretrain_cache_by_hand(tmp_path):
    """Budgets of 6 and 9 tokens, shards of 4 tokens."""
    texts = ["ab", "cdef", "gh", "", "ijk", "lmnop", "never read"]
    build_pretrain(texts, tmp_path / "c", max_val_tokens=6, max_train_tokens=9, shard_bytes=8)
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


def test_endless_input_stops_when_train_is_full(tmp_path):
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield f"document {i}"

    with small_steps(batch_items=2):
        build_pretrain(endless(), tmp_path / "c", max_train_tokens=500, max_val_tokens=100, workers=2)
    texts = [f"document {i}" for i in range(1000)]
    check_pretrain(tmp_path / "c", expected_pretrain(texts, max_train_tokens=500, max_val_tokens=100), shard_bytes=32)
    assert len(read) < 100  # a few items are read ahead


# --- dropped documents -------------------------------------------------------------------------------


def test_dropped_documents_are_counted_and_logged(tmp_path, caplog):
    bad = [*SPECIAL_STRINGS, "a\ud83d", None, 3.5, "", ""]
    build_pretrain(["good", *bad, "fine"], tmp_path / "c")
    assert documents_of(tmp_path / "c") == ["good", "fine"]
    dropped = meta_of(tmp_path / "c")["dropped"]
    assert sorted(dropped.values()) == [2, 3, 4]
    logged = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(logged) == 1
    assert "9 documents" in logged[0]
    assert all(f"{number} {reason}" in logged[0] for reason, number in dropped.items())


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
    build_pretrain(["good", *odd], tmp_path / "c")
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
        build_pretrain(texts, tmp_path / str(n), shuffle_buffer=buffer)
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
    build_pretrain(texts, tmp_path / "all", shuffle_buffer=16)
    order = documents_of(tmp_path / "all")
    budgets = {"max_train_tokens": 200, "max_val_tokens": 100}
    build_pretrain(texts, tmp_path / "c", shuffle_buffer=16, **budgets)
    check_pretrain(tmp_path / "c", expected_pretrain(order, **budgets), 32)


def test_val_texts_are_shuffled_separately(tmp_path):
    texts, val_texts = [f"t{i}" for i in range(30)], [f"v{i}" for i in range(30)]
    build_pretrain(texts, tmp_path / "c", shuffle_buffer=30, val_texts=val_texts, max_val_tokens=UNLIMITED)
    train, val = documents_of(tmp_path / "c"), documents_of(tmp_path / "c", "val")
    assert sorted(train) == sorted(texts)
    assert sorted(val) == sorted(val_texts)
    assert val != val_texts
    assert [text[1:] for text in train] != [text[1:] for text in val]  # different permutations


# --- val_texts ---------------------------------------------------------------------------------------


def test_split_rule_is_recorded(tmp_path):
    build_pretrain(["a", "b"], tmp_path / "a", max_val_tokens=2)
    build_pretrain(["a", "b"], tmp_path / "b", val_texts=["b"], max_val_tokens=2)
    rules = [meta_of(tmp_path / name)["split_rule"] for name in "ab"]
    assert rules[0] != rules[1]
    assert all("cut" in rule and "EOT" in rule for rule in rules)


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"shard_bytes": 3}, "shard_bytes.*3"),
        ({"max_train_tokens": -1}, "max_train_tokens.*-1"),
        ({"max_val_tokens": -1}, "max_val_tokens.*-1"),
        ({"seed": -1}, "seed.*-1"),
        ({"shuffle_buffer": -1}, "shuffle_buffer.*-1"),
        ({"workers": 0}, "workers.*0"),
        ({"max_train_tokens": True}, "max_train_tokens.*True"),
        ({"max_val_tokens": 1.0}, "max_val_tokens.*1.0"),
    ],
)
def test_invalid_numbers_are_named(tmp_path, changes, wanted):
    with pytest.raises(ValueError, match=wanted):
        build_pretrain(["abc", "def"], tmp_path / "c", **changes)
    assert is_empty(tmp_path)


def test_string_instead_of_a_list_raises(tmp_path):
    for texts, more in (("abc", {}), (["abc"], {"val_texts": "abc", "max_val_tokens": 3})):
        with pytest.raises(ValueError, match="one string"):
            build_pretrain(texts, tmp_path / "c", shuffle_buffer=5, **more)
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
        build_pretrain(texts, tmp_path / "c", **options)
    assert caught.value.budget == budget
    assert is_empty(tmp_path)
    build_pretrain(["abc"], tmp_path / "c")  # the next build succeeds
    before = digests(tmp_path / "c")
    with pytest.raises(TrainEmpty):
        build_pretrain(texts, tmp_path / "c", **options)
    assert digests(tmp_path / "c") == before


# --- meta --------------------------------------------------------------------------------------------


def test_meta_has_the_fields_of_the_spec(tmp_path):
    recorded = {"dataset_name": "fineweb_edu", "dataset_config": "CC-MAIN-2024-10", "revision": "0123abc"}
    recorded |= {"streaming": True, "seed": 7, "max_val_tokens": 4}
    folder = build_pretrain(["abc", "", "def", "ghi"], tmp_path / "c", **recorded)
    totals = {"train_tokens": 8, "val_tokens": 4, "train_documents": 2, "val_documents": 1}
    wanted = {**recorded, **totals, **BYTES_META, "shard_bytes": 32, "shuffle_buffer": 0, "format_version": 1}
    meta = meta_of(folder)
    assert {key: meta[key] for key in wanted} == wanted
    assert meta["split_rule"]
    check_listing(folder)


# --- output folder -----------------------------------------------------------------------------------


def test_caches_in_one_folder_do_not_interfere(tmp_path):
    """One is built while the input of the other is read."""

    def texts():
        yield "outer a"
        build_pretrain(["inner"], tmp_path / "inner")
        yield "outer b"

    build_pretrain(texts(), tmp_path / "outer")
    assert documents_of(tmp_path / "inner") == ["inner"]
    assert documents_of(tmp_path / "outer") == ["outer a", "outer b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "outer"]
