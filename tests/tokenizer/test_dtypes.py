import pytest

from niels_gpt.tokenizer.dtypes import token_dtype


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "<u2"), (16_004, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (128_256, "<u4"), (151_936, "<u4"), (2**31, "<u4")],
)
def test_ids_past_65_535_need_32_bits(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_vocabulary_out_of_range_raises(vocab_size):
    with pytest.raises(ValueError, match=f"{vocab_size:,} ids"):
        token_dtype(vocab_size)
