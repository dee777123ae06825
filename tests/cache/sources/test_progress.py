"""Progress of a build: the values reported and the line printed."""

import time
from unittest import mock

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.formats import NO_LIMIT
from niels_gpt.cache.sources import progress as progress_module
from niels_gpt.cache.sources.progress import ProgressLine, show_progress
from niels_gpt.cache.writing import input_batches
from niels_gpt.cache.writing.partial_build import Progress
from niels_gpt.system import progress as system_progress
from tests.cache import ByteTokenizer


def reported(build, *arguments, **options):
    """The progress that a build reports, with one item per batch."""
    reports = []
    with mock.patch.object(input_batches, "BATCH_ITEMS", 1):
        build(*arguments, tokenizer=ByteTokenizer(), seed=0, on_progress=reports.append, **options)
    return reports


def pretrain(tmp_path, **options):
    settings = {"max_train_tokens": NO_LIMIT, "max_val_tokens": 0, "shard_bytes": 64, "shuffle_buffer": None}
    return reported(build_pretrain_cache, ["abc"] * 8, tmp_path / "c", **settings | options)


def test_share_from_budgets(tmp_path):
    reports = pretrain(tmp_path, max_train_tokens=24, max_val_tokens=8)
    assert [(p.tokens, p.documents) for p in reports] == [(4 * n, n) for n in range(1, 9)]
    assert [p.share for p in reports] == [n / 8 for n in range(1, 9)]


def test_share_from_the_number_of_documents(tmp_path):
    assert [p.share for p in pretrain(tmp_path, expected_documents=16)] == [n / 16 for n in range(1, 9)]
    chat = [[{"role": "user", "content": "q"}]] * 4
    reports = reported(build_sft_cache, chat, tmp_path / "s", val_frac=0.5, expected_documents=4)
    assert [p.share for p in reports] == [0.25, 0.5, 0.75, 1.0]


def test_no_share_without_totals(tmp_path):
    assert {p.share for p in pretrain(tmp_path)} == {None}


def test_rate_and_time_left_since_the_first_report(monkeypatch):
    """100 tokens before the first report; 200 in two seconds, an eighth of the total; six eighths are left."""
    now = 50.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    line = ProgressLine("notes")
    assert line.text(Progress("train", 100, 3, 0.125)) == "notes: 100 tokens of 3 documents"
    now = 52.0
    assert line.text(Progress("train", 300, 9, 0.25)) == "notes: 300 tokens of 9 documents, 100 tok/s, 0:12 left"
    assert line.text(Progress("train", 300, 9, 0.125)) == "notes: 300 tokens of 9 documents, 100 tok/s"
    now = 54.0
    assert line.text(Progress("train", 500, 20)) == "notes: 500 tokens of 20 documents, 100 tok/s"


def test_without_a_terminal_the_latest_line_is_printed_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(system_progress, "SECONDS_BETWEEN_LINES", 0.05)
    began, text = time.monotonic(), ""
    with show_progress("notes") as on_progress:
        for tokens in range(5):
            on_progress(Progress("train", tokens, 1))
        while text.count("notes: 4 tokens of 1 documents") < 3:
            assert time.monotonic() < began + 60, text
            time.sleep(0.02)
            text += capsys.readouterr().err
    lines = text.splitlines()
    assert len(lines) <= (time.monotonic() - began) / 0.05
    latest = ["4" in line.partition(" tokens")[0] for line in lines]  # on a busy machine, others come before
    assert latest == sorted(latest)
