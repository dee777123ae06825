"""Fixtures of the source tests. Imports are local: tests/conftest.py must configure `datasets` before its import."""

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory, without NIELS_GPT_DATA."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    """A tokenizer that differs from `real_tokenizer`, and its folder."""
    from niels_gpt.tokenizer import load_tokenizer, train_tokenizer
    from tests.cache.sources.inputs import BOOKS, PAGES

    folder = tmp_path_factory.mktemp("other")
    return load_tokenizer(train_tokenizer(PAGES + BOOKS, folder, vocab_size=300)), folder


@pytest.fixture
def everything(monkeypatch):
    """Local files of all sources: Hub sources in NIELS_GPT_DATA, notes, dialogues, and user sources."""
    from niels_gpt.config import DataConfig, SourceConfig
    from tests.cache.sources import inputs

    monkeypatch.setenv("NIELS_GPT_DATA", str(inputs.write_everything()))
    inputs.write_notes(".roam-data")
    inputs.write_dialogues("data/primer.txt")
    rows = [{"text": f"text {i}", "title": f"a title of {i}", "n": i} for i in range(15)]
    inputs.write_rows("mine/rows.jsonl", rows)
    inputs.write_rows("chats.jsonl", [{"messages": inputs.messages(turns)} for turns in inputs.DIALOGUES])
    return DataConfig(sources={"mine": SourceConfig("mine"), "chats": SourceConfig("chats.jsonl")})
