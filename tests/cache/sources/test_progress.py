"""How far a build is, and what is shown of it."""

import logging
from unittest import mock

import pytest

from niels_gpt.cache import commands
from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.formats import NO_LIMIT
from niels_gpt.cache.sources.texts import Rereadable
from niels_gpt.cache.writing import input_batches
from niels_gpt.cache.writing.partial_build import Progress
from tests.cache import ByteTokenizer


def told(build, *arguments, **options):
    """What a build tells while it runs, a batch per item."""
    heard = []
    with mock.patch.object(input_batches, "BATCH_ITEMS", 1):
        build(*arguments, tokenizer=ByteTokenizer(), seed=0, on_progress=heard.append, **options)
    return heard


def pretrain(tmp_path, **options):
    settings = {"max_train_tokens": NO_LIMIT, "max_val_tokens": 0, "shard_bytes": 64, "shuffle_buffer": None}
    return told(build_pretrain_cache, ["abc"] * 8, tmp_path / "c", **settings | options)


def test_budgets_tell_the_share(tmp_path):
    heard = pretrain(tmp_path, max_train_tokens=24, max_val_tokens=8)
    assert [(p.tokens, p.documents) for p in heard] == [(4 * n, n) for n in range(1, 9)]
    assert [p.share for p in heard] == [n / 8 for n in range(1, 9)]


def test_the_number_of_documents_tells_the_share(tmp_path):
    assert [p.share for p in pretrain(tmp_path, expected_documents=16)] == [n / 16 for n in range(1, 9)]
    chat = [[{"role": "user", "content": "q"}]] * 4
    heard = told(build_sft_cache, chat, tmp_path / "s", val_frac=0.5, expected_documents=4)
    assert [p.share for p in heard] == [0.25, 0.5, 0.75, 1.0]


def test_without_either_there_is_none(tmp_path):
    assert {p.share for p in pretrain(tmp_path)} == {None}


def test_the_clock_runs_from_the_first_progress(monkeypatch):
    """100 tokens were there already; 200 came in two seconds, an eighth of the whole; six eighths are left."""
    now = 50.0
    monkeypatch.setattr(commands.time, "monotonic", lambda: now)
    clock = commands._Clock("notes")
    assert clock.text(Progress("train", 100, 3, 0.125)) == "notes: 100 tokens of 3 documents"
    now = 52.0
    assert clock.text(Progress("train", 300, 9, 0.25)) == "notes: 300 tokens of 9 documents, 100 tok/s, 0:12 left"
    now = 54.0
    assert clock.text(Progress("train", 500, 20)) == "notes: 500 tokens of 20 documents, 100 tok/s"


def test_counting_reads_once_and_says_nothing(caplog):
    opened = []

    def read(dropped):
        opened.append(1)
        dropped["empty"] = 2
        logging.getLogger("niels_gpt.data").warning("left out")
        yield from "abc"

    items = Rereadable(read)
    assert (items.count(), items.count(), len(opened), caplog.records) == (3, 3, 1, [])
    assert list(items) == ["a", "b", "c"]
    assert items.dropped == {"empty": 2} and [r.getMessage() for r in caplog.records] == ["left out"]


@pytest.mark.parametrize("number", [0, 5])
def test_a_known_number_is_not_counted(number):
    def read(dropped):
        raise AssertionError("it was read")

    assert Rereadable(read, number).count() == number
