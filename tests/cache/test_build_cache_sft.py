import itertools
import struct
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import Message
from niels_gpt.cache.writing import encoding
from tests.cache import (
    BYTES_META,
    SPECIAL_STRINGS,
    ByteTokenizer,
    build_sft,
    check_listing,
    check_sft,
    digests,
    meta_of,
    quick_folder,
    read_offsets,
    read_tokens,
    small_steps,
)


def ask(number):
    """Unique examples."""
    return [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(number)]


def examples_of(folder, split):
    """The token sequences, split at the offsets."""
    tokens = read_tokens(folder / f"{split}_tokens.bin")
    starts = read_offsets(folder / f"{split}_idx.npy")
    return [tokens[a:b] for a, b in itertools.pairwise([*starts, len(tokens)])]


# --- against the reference ---------------------------------------------------------------------------

CONTENTS = st.text(st.sampled_from("ab\r\né😀 "), min_size=1, max_size=8)
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS})
GOOD = st.lists(MESSAGES, min_size=1, max_size=4)
BAD = st.sampled_from(
    [
        ([], encoding.NO_MESSAGES),
        (None, encoding.NO_MESSAGES),
        ("text", encoding.NO_MESSAGES),
        ([{"role": "tool", "content": "a"}], encoding.BAD_ROLE),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], encoding.NO_CONTENT),
        ([{"role": "user", "content": "\ud800"}], encoding.NOT_TEXT),
        ([{"role": "user", "content": SPECIAL_STRINGS[2]}], encoding.SPECIAL),
    ]
)


@settings(max_examples=60)
@given(
    items=st.lists(GOOD.map(lambda example: (example, None)) | BAD, max_size=15),
    val_frac=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 0.999, 1e-9]),
    seed=st.integers(0, 2**63 - 1),
    batch_items=st.integers(1, 5),
    step_bytes=st.integers(1, 20).map(lambda n: 2 * n) | st.just(4 << 20),
    workers=st.integers(1, 3),
    one_shot=st.booleans(),
)
def test_every_file_equals_the_reference(items, val_frac, seed, batch_items, step_bytes, workers, one_shot):
    examples = [example for example, _ in items]
    kept = [example for example, reason in items if reason is None]
    reasons = [reason for _, reason in items if reason is not None]
    given_examples = iter(examples) if one_shot else examples
    options = {"val_frac": val_frac, "seed": seed}
    with quick_folder() as root, small_steps(batch_items=batch_items, sft_step_bytes=step_bytes):
        folder = root / "cache"
        if kept:
            build_sft(given_examples, folder, workers=workers, **options)
            check_sft(folder, kept, tokenizer=ByteTokenizer(), **options)
            assert meta_of(folder)["dropped"] == {reason: reasons.count(reason) for reason in set(reasons)}
            assert meta_of(folder)["inputs"]["examples"]["items"] == len(items)
            assert [path.name for path in root.iterdir()] == ["cache"]
        else:
            with pytest.raises(ValueError, match=f"{len(items)} examples"):
                build_sft(given_examples, folder, workers=workers, **options)
            assert list(root.iterdir()) == []


def test_sft_cache_by_hand(tmp_path):
    """torch.randperm(5) with seed 42 is 2 4 3 0 1: examples 2 and 4 are held out."""
    build_sft(ask(5), tmp_path / "c", val_frac=0.4)
    q, a, eot = ord("q"), ord("a"), 259
    wanted = [[257, q, 48 + i, eot, 258, a, 48 + i, eot] for i in range(5)]
    assert examples_of(tmp_path / "c", "val") == [wanted[2], wanted[4]]
    assert examples_of(tmp_path / "c", "train") == [wanted[0], wanted[1], wanted[3]]
    assert (tmp_path / "c" / "val_tokens.bin").read_bytes() == struct.pack("<16H", *wanted[2], *wanted[4])
    assert read_offsets(tmp_path / "c" / "train_idx.npy") == [0, 8, 16]
    assert read_offsets(tmp_path / "c" / "val_idx.npy") == [0, 8]


# --- split -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "val_frac", "held_out"),
    [(1, 1.0, 0), (2, 0.0, 0), (2, 0.1, 1), (2, 1.0, 1), (10, 0.59, 5), (10, 1.0, 9), (10, 1e-9, 1)],
)
def test_number_of_held_out_examples(tmp_path, number, val_frac, held_out):
    build_sft(ask(number), tmp_path / "c", val_frac=val_frac)
    meta = meta_of(tmp_path / "c")
    assert (meta["train_examples"], meta["val_examples"]) == (number - held_out, held_out)
    assert len(examples_of(tmp_path / "c", "val")) == held_out
    check_sft(tmp_path / "c", ask(number), tokenizer=ByteTokenizer(), val_frac=val_frac, seed=42)


# --- dropped examples and errors -----------------------------------------------------------------------


def test_dropped_examples_are_counted_and_logged(tmp_path, caplog):
    bad = [
        [],
        None,
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": SPECIAL_STRINGS[3]}],
    ]
    build_sft([*ask(2), *bad, *ask(1)], tmp_path / "c", val_frac=0)
    dropped = meta_of(tmp_path / "c")["dropped"]
    assert sorted(dropped.values()) == [1, 1, 2, 3]
    logged = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(logged) == 1
    assert "7 examples" in logged[0]
    assert all(f"{number} {reason}" in logged[0] for reason, number in dropped.items())
    assert len(examples_of(tmp_path / "c", "train")) == 3


def test_extra_keys_and_other_mappings_are_accepted(tmp_path):
    message = {"role": "user", "content": "q", "id": 3, "meta": {"a": [1]}}
    build_sft(
        [[message], (message,), [MappingProxyType(message)], [{**message, None: "x"}]], tmp_path / "c", val_frac=0
    )
    assert examples_of(tmp_path / "c", "train") == [[257, ord("q"), 259]] * 4


@pytest.mark.parametrize("examples", [[], [[]], [None, [], "x"], iter(())])
def test_no_kept_example_raises(tmp_path, examples):
    with pytest.raises(ValueError, match=r"c: all .* examples"):
        build_sft(examples, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    build_sft(ask(1), tmp_path / "c")
    before = digests(tmp_path / "c")
    with pytest.raises(ValueError, match="examples"):
        build_sft([[]], tmp_path / "c")
    assert digests(tmp_path / "c") == before


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"val_frac": -0.01}, "val_frac.*-0.01"),
        ({"val_frac": 1.01}, "val_frac.*1.01"),
        ({"seed": -1}, "seed.*-1"),
        ({"workers": 0}, "workers.*0"),
    ],
)
def test_invalid_numbers_are_named(tmp_path, changes, wanted):
    with pytest.raises(ValueError, match=wanted):
        build_sft(ask(4), tmp_path / "c", **changes)
    assert list(tmp_path.iterdir()) == []


# --- meta and folder -----------------------------------------------------------------------------------


def test_meta_has_the_fields_of_the_spec(tmp_path):
    recorded = {"dataset_name": "oasst1", "dataset_config": "c", "revision": "0123abc", "streaming": True}
    recorded |= {"seed": 7, "val_frac": 0.3}
    folder = build_sft(ask(10), tmp_path / "c", **recorded)
    wanted = {**recorded, **BYTES_META, "train_examples": 7, "val_examples": 3, "dropped": {}, "format_version": 1}
    meta = meta_of(folder)
    assert {key: meta[key] for key in wanted} == wanted
    assert "torch.randperm" in meta["split_rule"]
    assert str(tmp_path) not in (folder / "meta.json").read_text(encoding="utf-8")
    check_listing(folder)


def test_message_type():
    assert Message(role="user", content="a") == {"role": "user", "content": "a"}
    assert set(Message.__annotations__) == {"role", "content"}
