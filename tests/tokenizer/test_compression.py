"""Compression by a tokenizer, against its own ids. tests/cli/test_tokenizer.py measures it against SentencePiece."""

from niels_gpt.tokenizer import SPECIAL_TOKENS
from niels_gpt.tokenizer.compression import UNKNOWN_ID, measure_compression, multi_byte_subwords


def test_texts_are_counted(tokenizer):
    texts = ["the first text", "the second: \u00e9\u4e16"]
    found = measure_compression(tokenizer, [*texts, f"forged {SPECIAL_TOKENS[0]}"])
    ids = [i for text in texts for i in tokenizer.encode(text)]
    assert (found.texts, found.bytes, found.tokens) == (2, sum(len(text.encode()) for text in texts), len(ids))
    assert found.one_byte == sum(len(tokenizer.token_bytes[i]) == 1 for i in ids)
    assert found.counts.tolist() == [ids.count(i) for i in range(tokenizer.vocab_size)]
    assert measure_compression(tokenizer, SPECIAL_TOKENS) is None


def test_subwords_of_several_bytes_are_the_longest_first(tokenizer):
    ids = multi_byte_subwords(tokenizer)
    sizes = [len(tokenizer.token_bytes[i]) for i in ids]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 1
    excluded = set(range(tokenizer.vocab_size)) - set(ids)
    assert {UNKNOWN_ID, *tokenizer.special_token_ids().values()} <= excluded
