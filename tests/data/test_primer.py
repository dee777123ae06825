import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.data.primer import load_primer_text, primer_dialogues, split_primer_dialogues

DELIMITER = "\n\n<dialogue>\n\n"


def naive_blocks(text, delimiter=DELIMITER):
    """The blocks between delimiters, found one by one from the left; blank ones dropped."""
    blocks, rest = [], text
    while (place := rest.find(delimiter)) >= 0:
        blocks.append(rest[:place])
        rest = rest[place + len(delimiter) :]
    return [block for block in [*blocks, rest] if block.strip() != ""]


def naive_split(text, val_frac, seed, delimiter=DELIMITER):
    blocks = naive_blocks(text, delimiter)
    n = len(blocks)
    n_val = 0 if n < 2 or val_frac == 0 else min(n - 1, max(1, int(n * val_frac)))
    generator = torch.Generator()
    generator.manual_seed(seed)
    held_out = torch.randperm(n, generator=generator)[:n_val].tolist()
    train = [block for i, block in enumerate(blocks) if i not in held_out]
    val = [block for i, block in enumerate(blocks) if i in held_out]
    return delimiter.join(train), delimiter.join(val)


TEXTS = st.lists(
    st.sampled_from(
        [DELIMITER, DELIMITER, "<dialogue>", "\n\n", "\n", " ", "user: a\nassistant: b", "x", "é", "\r\n", "\t"]
    ),
    max_size=20,
).map("".join)


@pytest.mark.parametrize(
    "data", [b"", b"user: a\r\nassistant: b\r", b"\xef\xbb\xbfuser: \xc3\xa9\n\n", b" \n<dialogue>\n "]
)
def test_text_is_read_as_stored(tmp_path, data):
    path = tmp_path / "primer.txt"
    path.write_bytes(data)
    assert load_primer_text(str(path)).encode("utf-8") == data


def test_what_is_not_utf8_is_named_with_the_byte_offset(tmp_path):
    path = tmp_path / "primer.txt"
    path.write_bytes("é".encode() * 3 + b"\xff")
    with pytest.raises(ValueError, match=r"primer\.txt.*\b6\b"):
        load_primer_text(str(path))
    assert load_primer_text(str(path), errors="replace") == "ééé\ufffd"


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_primer_text(str(tmp_path / "nowhere.txt"))


@given(TEXTS)
def test_dialogues_are_the_blocks_that_are_not_blank(text):
    assert primer_dialogues(text) == naive_blocks(text)


@given(TEXTS, st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.integers(0, 100))
def test_split_is_by_whole_dialogue(text, val_frac, seed):
    train, val = split_primer_dialogues(text, val_frac=val_frac, seed=seed)
    assert (train, val) == naive_split(text, val_frac, seed)
    # Nothing lost, nothing cut, nothing in both.
    assert sorted(naive_blocks(train) + naive_blocks(val)) == sorted(naive_blocks(text))


@given(st.lists(st.integers(0, 99), min_size=2, max_size=40, unique=True), st.floats(0.01, 1), st.integers(0, 2**31))
def test_held_out_dialogues_are_not_in_training(numbers, val_frac, seed):
    blocks = [f"user: {n}?\nassistant: {n}." for n in numbers]
    train, val = split_primer_dialogues(DELIMITER.join(blocks), val_frac=val_frac, seed=seed)
    left, held_out = train.split(DELIMITER), val.split(DELIMITER)
    assert not set(left) & set(held_out)
    assert [b for b in blocks if b in left] == left
    assert [b for b in blocks if b in held_out] == held_out
    assert len(held_out) == min(len(blocks) - 1, max(1, int(len(blocks) * val_frac)))


def test_blank_blocks_do_not_count():
    text = DELIMITER.join(["", "a", " \n\t", "b", "\n", "c", ""])
    train, val = split_primer_dialogues(text, val_frac=0.4, seed=0)
    assert sorted([*train.split(DELIMITER), val]) == ["a", "b", "c"]


def test_white_space_around_a_dialogue_stays():
    text = f"a\n{DELIMITER}  b  {DELIMITER}\nc"
    assert primer_dialogues(text) == ["a\n", "  b  ", "\nc"]
    assert split_primer_dialogues(text, val_frac=0, seed=0) == (text, "")


def test_one_dialogue_is_not_held_out():
    assert split_primer_dialogues("user: a\nassistant: b", val_frac=0.9, seed=0) == ("user: a\nassistant: b", "")
    assert split_primer_dialogues("", seed=0) == ("", "")
    assert split_primer_dialogues(" \n", seed=0) == ("", "")


def test_another_delimiter():
    text = "a--b--c--d"
    assert split_primer_dialogues(text, val_frac=0.5, seed=5, delimiter="--") == naive_split(text, 0.5, 5, "--")
    assert split_primer_dialogues(text, val_frac=0.5, seed=5) == (text, "")


def test_a_tenth_is_held_out_by_default():
    text = DELIMITER.join(f"block {i}" for i in range(20))
    train, val = split_primer_dialogues(text, seed=0)
    assert (len(train.split(DELIMITER)), len(val.split(DELIMITER))) == (18, 2)
