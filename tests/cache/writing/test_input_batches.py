"""Input items in batches, counted and hashed."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.writing import input_batches
from niels_gpt.cache.writing.input_batches import InputReader

ITEMS = st.lists(st.text("abé", max_size=4) | st.none() | st.integers() | st.just({"a": [1]}), max_size=12)


def encoded(item):
    """The reference for strings: type, length in 8 bytes, utf-8."""
    data = item.encode("utf-8", errors="surrogatepass")
    return b"text" + len(data).to_bytes(8, "little") + data


def sha(items):
    return hashlib.sha256(b"".join(encoded(item) for item in items)).hexdigest()


@given(ITEMS, st.integers(1, 5))
def test_batches_contain_all_items_in_order(items, batch_items):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_batches, "BATCH_ITEMS", batch_items)
        batches = list(InputReader(items).batches())
    assert [item for batch in batches for item in batch.items] == items
    assert all(len(batch.items) == batch_items for batch in batches[:-1])
    assert [batch.first for batch in batches] == list(range(0, len(items), batch_items))


def test_batches_end_at_the_byte_limit(monkeypatch):
    """Each item has 12 bytes of header; a batch ends with the item that reaches the limit."""
    monkeypatch.setattr(input_batches, "BATCH_BYTES", 26)
    sizes = [len(batch.items) for batch in InputReader(["a", "b", "c", "x" * 14, "d", "", "e"]).batches()]
    assert sizes == [2, 2, 3]


def test_hash_after_every_item():
    items = [f"item {i}" for i in range(7)]
    reader = InputReader(items)
    reader.skip(2)
    assert reader.hash.hexdigest() == sha(items[:2])
    (batch,) = reader.batches()
    assert batch.first == 2
    for number in range(6):
        assert batch.hash_after(number).hexdigest() == sha(items[: 2 + number])
    assert reader.hash.hexdigest() == sha(items)


def test_skip_and_peek():
    reader = InputReader(iter("abc"))
    reader.skip(0)
    assert reader.hash.hexdigest() == sha([])
    reader.skip(1)
    assert reader.peek().hexdigest() == sha("ab")
    assert reader.peek().hexdigest() == sha("ab")
    assert reader.hash.hexdigest() == sha("a")
    assert [batch.items for batch in reader.batches()] == [["b", "c"]]
    assert reader.peek().hexdigest() == sha("abc")


def test_skip_past_the_end():
    reader = InputReader(["a"])
    reader.skip(5)
    assert reader.hash.hexdigest() == sha("a")
    assert reader.at_end()
    assert not InputReader(["a"]).at_end()


def test_one_string_raises():
    with pytest.raises(ValueError, match="one string"):
        InputReader("abc")


def test_items_have_different_hashes():
    """Also items that no builder keeps, without addresses in the hash."""
    groups = [["ab", "c"], ["a", "bc"], [None], ["null"], [b"x"], [object()], [{"a": 1}], [{"a": "1"}], ["\ud800"], [1]]

    def digest(items):
        reader = InputReader(items)
        reader.skip(len(items))
        return reader.hash.hexdigest()

    assert len({digest(items) for items in groups}) == len(groups)
    assert digest([object()]) == digest([object()])
