"""`niels-gpt research splice fit` and `study`: output, files, errors."""

from __future__ import annotations

import json
import math
import signal

import pytest

from niels_gpt.runs.folder import RunFolder
from niels_gpt.training.progress import Silent
from tests.cli import After, call, error_of, report_to, send
from tests.cli.reciting import VAL_FRAC, longest, one_thread, split, write_notes
from tests.report.pages import read
from tests.training import metric_lines

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The working directory, with notes/ in it."""
    monkeypatch.chdir(tmp_path)
    write_notes(tmp_path / "notes")
    with one_thread():
        yield tmp_path


def output(capsys, *arguments):
    assert call(*arguments) == 0
    return capsys.readouterr().out


# --- fit ---------------------------------------------------------------------------------------------

LAW = (1.7, -0.8, -4.0)


def write_report(run, tokens, epochs):
    """Write the report of a run that follows the law; controls and step 0 must not count."""
    c1, c2, c3 = LAW
    checkpoints = []
    for i, epoch in enumerate(epochs):
        log_p = c1 * math.log(epoch) + c2 * math.log(tokens) + c3 if epoch else -400.0
        documents = [
            {"name": "a", "control": False, "mean_log_p": log_p - 1},
            {"name": "b", "control": False, "mean_log_p": log_p + 1},
            {"name": "c", "control": True, "mean_log_p": -300.0},
        ]
        checkpoints.append({"step": 10 * i, "epochs": epoch, "documents": documents})
    report = {"format": 2, "train_tokens": tokens, "checkpoints": checkpoints}
    (run / "memorization").mkdir(parents=True, exist_ok=True)
    (run / "memorization" / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return run


def test_fit_recovers_the_law(place, capsys):
    runs = [write_report(place / f"run{tokens}", tokens, (0, 1, 4, 9.5)) for tokens in (100, 300, 2000)]
    found = json.loads(output(capsys, "splice", "fit", *runs, "--json"))
    law = found["law"]
    assert [law["c1"], law["c2"], law["c3"]] == pytest.approx(LAW)
    assert law["r2"] == pytest.approx(1)
    assert law["points"] == len(found["points"]) == 9  # step 0 has no epochs
    assert {point["tokens"] for point in found["points"]} == {100, 300, 2000}
    text = output(capsys, "splice", "fit", *runs, "--png", "law.png", "--html", "law.html")
    assert "log P(z) = 1.7 log(epochs) - 0.8 log(tokens) - 4" in text
    assert "9 points" in text
    assert (place / "law.png").read_bytes().startswith(PNG)
    page = read((place / "law.html").read_text(encoding="utf-8"))
    assert any("run2000, step 30" in cell for cell in page.texts("td"))


def test_runs_that_cannot_be_fitted(place, capsys):
    run = place / "my run"
    run.mkdir()
    good = write_report(place / "good", 100, (1, 2))
    assert call("research", "splice", "fit", good, run) == 1
    assert f"niels-gpt research memorize '{run}'" in error_of(capsys)
    write_report(run, 100, ())  # as `memorize --no-curve` writes it
    assert call("research", "splice", "fit", run) == 1
    assert "checkpoint" in error_of(capsys)
    (run / "memorization/report.json").write_text("{", encoding="utf-8")
    assert call("research", "splice", "fit", run) == 1
    assert "my run/memorization/report.json" in error_of(capsys)


# --- study -------------------------------------------------------------------------------------------

STUDY = [
    "--roam=notes",
    "--set=model={T: 64, C: 16, L: 1, H: 2, dropout: 0.0}",
    f"--set=data.roam_val_frac={VAL_FRAC}",
    "--set=splice.controls=1",
    "--set=splice.eval_examples=2",
    "--set=train.B=4",
    "--set=train.total_steps=4",
    "--set=train.warmup_steps=0",
    "--set=train.base_lr=1e-2",
    "--set=output.checkpoint_every=2",
    "--set=output.sample_tokens=2",
    "--device=cpu",
    "--stride=20",
]
VARY = ["--vary", "splice.num_docs=1, 2", "--out", "study"]


def test_study(place, capsys, monkeypatch):
    """Two runs, their reports, and the law. A signal stops the second run; the same command resumes it."""
    report_to(monkeypatch, Silent(), After(2, send(signal.SIGINT)))
    assert call("research", "splice", "study", *STUDY, *VARY) == 130
    text, errors = capsys.readouterr()
    assert "Traceback" not in errors and "the same command again" in text
    assert not (place / "study/law.html").exists()
    finished = metric_lines(place / "study/num_docs-1")
    text = output(capsys, "splice", "study", *STUDY, *VARY)
    assert metric_lines(place / "study/num_docs-1") == finished
    train, _ = split(place / "notes")
    for number in (1, 2):
        run = RunFolder(place / "study" / f"num_docs-{number}")
        assert f"splice.num_docs = {number}: study/num_docs-{number} (resuming)" in text
        assert run.read_config().splice.num_docs == number
        assert [line["step"] for line in metric_lines(run.path)] == [0, 1, 2, 3]
        report = json.loads((run.path / "memorization/report.json").read_text(encoding="utf-8"))
        assert report["train_tokens"] == sum((place / "notes" / n).stat().st_size for n in longest(train, number))
        assert [entry["step"] for entry in report["checkpoints"]][-1] == 4
        assert (report["settings"]["window"], report["settings"]["stride"]) == (65, 20)  # 65 is what fits T
    assert "log P(z) = " in text
    assert (place / "study/law.png").read_bytes().startswith(PNG)
    page = read((place / "study/law.html").read_text(encoding="utf-8"))
    assert any("num_docs-2, step 4" in cell for cell in page.texts("td"))


@pytest.mark.parametrize(
    ("vary", "mentioned"),
    [
        ("splice.num_docs=1,2, 1", "1,2, 1"),
        ("splice.num_docs", "KEY=A,B,C"),
        ("splice.num_docs=1,,2", "KEY=A,B,C"),
        ("splice.num_docs=1,50", "num_docs=50"),
    ],
)
def test_invalid_studies_train_nothing(place, capsys, vary, mentioned):
    assert call("research", "splice", "study", *STUDY, "--vary", vary, "--out", "study") == 1
    assert mentioned in capsys.readouterr().err
    assert not (place / "study").exists()
