"""A tokenizer of subwords for the chat tests."""

import warnings

import pytest

from niels_gpt.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def subwords(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short text has few pieces
        return load_tokenizer(train_tokenizer(["hello niels, how are you?"], tmp_path_factory.mktemp("subwords")))
