"""`niels-gpt runs report`; tests/report tests what the documents say."""

import math
import re
import shlex

import numpy as np
import pytest

from niels_gpt.report import run_report
from niels_gpt.runs.environment import read_environment
from niels_gpt.runs.folder import RunFolder
from niels_gpt.tokenizer import text_bytes
from niels_gpt.training import tracking
from tests import token_caches
from tests.cache import stream_of
from tests.cli import SMALL, call, data, error_of
from tests.report.pages import read
from tests.report.test_document import rows_of
from tests.runs.test_catalog import P_VAL, make_pipeline, make_run
from tests.training import write_texts

EVALS = [(i, {"val_roam": 3.0 - i, "val_chat": 2.0}) for i in range(3)]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, and a report that compresses nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_report, "references", lambda stream, *, train, whole: {"uniform_bits": 8.0})
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, P_VAL, evals=EVALS)
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "data")


def losses(run):
    return [(m["step"], m["loss"], m["lr"], m.get("evals")) for m in RunFolder(run).metrics()]


@pytest.mark.slow
def test_a_trained_and_extended_run_is_reported_and_reproduced(tmp_path, texts, monkeypatch, capsys):
    """The command of the report trains the same steps again, bit for bit, although the run was extended."""
    monkeypatch.chdir(tmp_path)
    options = [*data(texts), *SMALL, "--set=output.eval_every=3", "--set=output.checkpoint_every=3"]
    assert call("train", *options, "--run-dir", "runs/a", "--steps", 6) == 0
    assert call("train", "runs/a", "--resume", "--steps", 9) == 0
    assert call("runs", "report", "runs/a") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["report: runs/a/report.html", "report: runs/a/report.md"]
    page = read((tmp_path / "runs/a/report.html").read_text(encoding="utf-8"))
    text = (tmp_path / "runs/a/report.md").read_text(encoding="utf-8")
    assert page.texts("h1") == ["a"] and "Finished: 9 of 9 steps" in text
    rows = {row[0]: row for row in rows_of(text)}
    assert rows["roam"][4:6] == ["12", "yours"] and rows["primer"][4:6] == ["40", "yours"]
    assert float(rows["val_roam"][4]) > 0 and rows["val_roam"][-1] == "8.000"  # xz and uniform
    sessions = read_environment(tmp_path / "runs/a").sessions
    assert [(s.step, s.steps, s.outcome) for s in sessions] == [(0, 6, "finished"), (6, 9, "finished")]
    assert all(session.command in text for session in sessions)
    [again] = re.findall(r"^niels-gpt (train --config runs/a/config.yaml .*)$", text, flags=re.MULTILINE)
    assert call(*shlex.split(again)) == 0
    assert losses("runs/a-again") == losses("runs/a")


def test_several_runs_are_compared(runs, capsys):
    assert call("runs", "report", "a", "b") == 0
    assert capsys.readouterr().out == "report: runs/compare-a-b.html\nreport: runs/compare-a-b.md\n"
    assert read((runs / "compare-a-b.html").read_text(encoding="utf-8")).texts("h1") == ["Runs a, b"]
    assert call("runs", "report", "a", "a") == 0  # one run
    assert capsys.readouterr().out.startswith("report: runs/a/report.html")


def test_the_newest_run_is_the_default(runs, tmp_path, capsys):
    assert call("runs", "report") == 0
    assert "report.html" in capsys.readouterr().out
    assert call("runs", "report", "--runs-dir", tmp_path / "none") == 1
    assert "no runs in" in error_of(capsys)


def test_a_pipeline_is_one_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_pipeline(tmp_path / "runs/chat")
    assert call("runs", "report", "chat") == 0
    assert capsys.readouterr().out.startswith("report: runs/chat/report.html")
    page = read((tmp_path / "runs/chat/report.html").read_text(encoding="utf-8"))
    assert page.texts("h2") == ["pretrain", "sft"]


def test_paths(runs, tmp_path, capsys):
    assert call("runs", "report", "a", "--out", tmp_path / "new" / "page.html") == 0
    assert (tmp_path / "new" / "page.md").exists()
    assert call("runs", "report", "a", "--out", tmp_path / "p.html", "--markdown", tmp_path / "other.txt") == 0
    assert (tmp_path / "other.txt").exists() and not (tmp_path / "p.md").exists()
    assert not (runs / "a" / "report.html").exists()
    capsys.readouterr()
    for wrong, reason in (
        (["a", "--out", tmp_path / "x.md"], "--markdown"),
        (["a", "--out", runs], "is a folder"),
        (["c"], "no run c"),
        (["a", "--memorization", tmp_path], "holds no report.json"),
    ):
        assert call("runs", "report", *wrong) == 1
        assert reason in error_of(capsys)


def test_a_damaged_run_is_one_line(runs, capsys):
    (runs / "a" / "config.yaml").write_text("[", encoding="utf-8")
    assert call("runs", "report", "a") == 1
    assert "not valid YAML" in error_of(capsys)


def test_a_report_contacts_nobody(runs, monkeypatch):
    """Also if the run has read from the Hub: then xz and gzip are missing."""
    make_run(runs / "hub", "data.wiki=hub", "train.p_val={wiki: 1.0}", evals=[(2, {"val_wiki": 2.0})])
    went = []
    monkeypatch.setattr("niels_gpt.data.reading.hub.go_offline", lambda: went.append("offline"))
    assert call("runs", "report", "hub") == 0
    assert went == ["offline"]
    text = (runs / "hub" / "report.md").read_text(encoding="utf-8")
    assert "compressors and unigram are missing" in text and "offline" in text


@pytest.mark.slow
def test_track_is_checked_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    for command in ("train", "pipeline"):
        assert call(command, "--run-dir", "runs/a", "--track", "wandb") == 1
        assert "pip install 'niels-gpt[track]'" in error_of(capsys)
        assert call(command, "--run-dir", "runs/a", "--track", "paper") == 1
        assert "must be tensorboard or wandb" in error_of(capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_track_gets_the_lines_of_metrics(tmp_path, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged = []

    class Fake:
        def __init__(self, run, config):
            logged.clear()

        def log(self, step, values):
            logged.append((step, values["loss"]))

        def close(self):
            logged.append("closed")

    monkeypatch.setitem(tracking.TRACKERS, "wandb", Fake)
    monkeypatch.setattr(tracking, "check_trackers", lambda names: None)
    options = [*data(texts), *SMALL, "--track", "wandb"]
    assert call("train", *options, "--run-dir", "runs/a", "--steps", 3) == 0
    assert call("train", "runs/a", "--resume", "--steps", 5, "--track", "wandb") == 0
    assert logged == [*((step, loss) for step, loss, *_ in losses("runs/a")), "closed"]


def test_markdown_and_page_are_written_as_utf8(runs):
    (runs / "a" / "samples").mkdir()
    (runs / "a" / "samples" / "step_00000003.txt").write_text("grüße 🙂", encoding="utf-8")
    assert call("runs", "report", "a") == 0
    assert "grüße 🙂" in (runs / "a" / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_token_models_in_bits_per_byte(token_runs, tmp_path, monkeypatch):
    """The sampled loss is in nats per token; bytes per token of the held-out text give bits per byte."""
    monkeypatch.chdir(token_runs)
    assert call("runs", "report", "runs/base", "--out", tmp_path / "r.html") == 0
    rows = {row[0]: row for row in rows_of((tmp_path / "r.md").read_text(encoding="utf-8"))}
    evals = next(m["evals"] for m in reversed(RunFolder("runs/base").metrics()) if "evals" in m)
    val = token_runs / "cache/pretrain/fineweb_edu"
    ids = np.array(stream_of(val, "val"))
    size = len(text_bytes(token_caches.tokenizer(), ids))
    _, bytes_, nats, bits, xz, *_, uniform = rows["val_fineweb_edu"]
    loss = evals["val_fineweb_edu"]
    assert (bytes_, nats, uniform) == (f"{size:,}", f"{loss:.3f}", "8.000") and float(xz) > 0
    assert float(bits) == pytest.approx(loss / math.log(2) * len(ids) / size, abs=1e-3)
    assert rows["fineweb_edu"][5] == "ODC-By 1.0"
    assert (
        call("runs", "report", "runs/chat", "--out", tmp_path / "chat.html") == 0
    )  # replies have no stream to compress
    rows = {row[0]: row for row in rows_of((tmp_path / "chat.md").read_text(encoding="utf-8"))}
    evals = next(m["evals"] for m in reversed(RunFolder("runs/chat").metrics()) if "evals" in m)
    assert rows["val_oasst1"][1:] == [f"{evals['val_oasst1']:.3f}"] and rows["oasst1"][5] == "Apache-2.0"
