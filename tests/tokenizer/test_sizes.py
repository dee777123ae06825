"""Sizes of tokens in bytes."""

import numpy as np
import pytest

from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer, fits, load_tokenizer, text_bytes, token_sizes
from tests import foreign_tokenizers


def test_every_byte_has_size_1():
    assert token_sizes(ByteTokenizer()).tolist() == [1] * 256
    assert text_bytes(ByteTokenizer(), np.array([104, 105])) == b"hi"


def test_which_vocabularies_of_models_fit(tokenizer, tmp_path):
    """Only the vocabulary of a tokenizer of others may be smaller than that of the model."""
    foreign = load_tokenizer(foreign_tokenizers.make("smollm", tmp_path))
    for each, more, fewer in ((tokenizer, False, False), (ByteTokenizer(), False, True), (foreign, True, False)):
        n = each.vocab_size
        assert [fits(each, V) for V in (n + 1, n, n - 1)] == [more, True, fewer]


def test_they_are_counted_once_and_read_only(tokenizer):
    sizes = token_sizes(tokenizer)
    assert token_sizes(tokenizer) is sizes and token_sizes(ByteTokenizer()) is not sizes
    with pytest.raises(ValueError, match="read-only"):
        sizes[0] = 1


def test_sizes_of_subwords_add_up_to_the_text(tokenizer):
    text = f"the bridge über 漢\u2581{SPECIAL_TOKENS[1]} and{SPECIAL_TOKENS[3]}"
    plain = text.replace(SPECIAL_TOKENS[1], "").replace(SPECIAL_TOKENS[3], "")
    ids = np.array(tokenizer.encode(text))
    sizes = token_sizes(tokenizer)
    assert sizes.shape == (tokenizer.vocab_size,)
    assert sizes[ids].sum() == len(plain.encode("utf-8"))
    assert [sizes[i] for i in tokenizer.special_token_ids().values()] == [0] * 4
    assert text_bytes(tokenizer, ids) == plain.encode("utf-8")
