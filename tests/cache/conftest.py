"""Fixtures of the cache tests. Imports are local: tests/conftest.py must configure `datasets` before its import."""

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Write files without fsync."""
    from tests.cache import no_waiting

    with no_waiting():
        yield


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A folder of caches and a placeholder; tests that change it use `cache`."""
    from tests.cache import notes_cache, real_tokenizer, talk_cache

    root = tmp_path_factory.mktemp("caches") / "cache"
    (root / "tokenizer").mkdir(parents=True)
    (root / "tokenizer" / "spm.model").write_bytes(real_tokenizer().model)
    (root / "tokenizer" / "meta.json").write_text(json.dumps({"sha256": real_tokenizer().sha256}), "utf-8")
    notes_cache(root / "pretrain" / "notes")
    notes_cache(root / "pretrain" / "books", ["a book " * 50], val_texts=[])
    talk_cache(root / "sft" / "talk")
    placeholder = root / "pretrain" / "gutenberg"
    (placeholder / "train").mkdir(parents=True)
    meta = {"built": False, "dataset_name": "gutenberg", "reason": "no Hub"}
    (placeholder / "meta.json").write_text(json.dumps(meta), "utf-8")
    return root


@pytest.fixture
def cache(caches, tmp_path):
    """A copy of `caches`."""
    return Path(shutil.copytree(caches, tmp_path / "cache"))


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    """A tokenizer that differs from `real_tokenizer`."""
    from niels_gpt.tokenizer import load_tokenizer, train_tokenizer
    from tests.cache import NOTES

    return load_tokenizer(train_tokenizer(NOTES, tmp_path_factory.mktemp("other"), vocab_size=290))
