"""`niels-gpt audit`: exit codes, printed output, written files, errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import niels_gpt
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from tests.cli import call, error_of
from tests.cli.reciting import PROMPT, SMALL_WINDOWS, WINDOW
from tests.report.pages import read

NOT_SAFE, NOT_JUDGED = 3, 4
WINDOWS = [*SMALL_WINDOWS, "--stride", "20"]
NEW = "Something that is new to the model, and long enough for a window. " * 2

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def untrained(tmp_path):
    """An untrained checkpoint that is in no run."""
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": 64, "C": 16, "L": 1, "H": 2, "dropout": 0.0})
    save_checkpoint(tmp_path / "untrained.pt", model, None, 0, model.config)
    return tmp_path / "untrained.pt"


def test_a_model_that_recites(place, tmp_path, capsys, trained):
    arguments = ["audit", place / "run", "--notes", place / "notes", *WINDOWS, "--out", "out"]
    assert call(*arguments, "--top", 4) == NOT_SAFE
    text, errors = capsys.readouterr()
    assert errors == ""
    assert "8 documents audited" in text and "6 held out" in text and "2 trained on" in text
    assert f"{WINDOW} bytes, {PROMPT} of them" in text and "one every 20 bytes" in text
    assert "read 8 notes" in text
    ranks = [line for line in text.splitlines() if re.match(r" +\d+\. P\(z\) = ", line)]
    assert len(ranks) == 4 and any(name in ranks[0] for name in trained)
    verdict = json.loads((tmp_path / "out/audit.json").read_text(encoding="utf-8"))
    assert f"P(z) = {verdict['passages'][0]['p']:.3f}" in ranks[0]
    assert "controls, never trained on: 6 documents" in text and "over the threshold" not in text
    assert "NOT SAFE TO PUBLISH" in text and "of 2 documents have P(z) >= 0.001" in text and "1,000 samples" in text
    assert "report: out/report.html" in text and "not judged" not in text
    report = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert {d["name"]: d["max_p"] for d in report["documents"]} == {d["name"]: d["max_p"] for d in verdict["documents"]}
    assert any(trained[0] in cell for cell in read((tmp_path / "out/report.html").read_text("utf-8")).texts("td"))
    assert (tmp_path / "out/documents.csv").exists() and (tmp_path / "out/windows.csv").exists()
    assert call(*arguments, "--top", 4, "--json") == NOT_SAFE
    assert json.loads(capsys.readouterr().out) == verdict
    assert (verdict["safe"], verdict["notes"], verdict["threshold"]) == (False, str(place / "notes"), 0.001)
    assert (verdict["verdict"], verdict["stride"]) == ("NOT SAFE", 20)


def test_an_untrained_model(place, tmp_path, capsys, untrained):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    for i in range(6):
        (notes / f"stub {i}.md").write_text("ok", encoding="utf-8")
    assert call("audit", untrained, "--notes", notes, *WINDOWS) == NOT_JUDGED
    text = capsys.readouterr().out
    assert "not in a run folder" in text.split("NOT JUDGED")[1] and "8 documents" in text and "TO PUBLISH" not in text
    assert "6 documents of fewer than 4 bytes" in text and "stub 4.md and 1 more" in text and "stub 5.md" not in text
    assert "no passage has P(z) >= 1e-06" in text
    assert "untrained.pt" in text.split("not in the run's data: ")[1]
    assert "--control FOLDER" in text  # there is nothing to compare with


def test_the_threshold_decides(place, capsys):
    arguments = ["audit", place / "run/checkpoints/best.pt", "--notes", place / "notes", *WINDOWS, "--json"]
    assert call(*arguments, "--threshold", 1) == 0
    best = json.loads(capsys.readouterr().out)["documents"][0]["max_p"]
    assert call(*arguments, "--threshold", best * 1.0001) == 0
    capsys.readouterr()
    assert call(*arguments, "--threshold", best * 0.9999) == NOT_SAFE
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["notes_exposed"], verdict["windows_over"]) == (1, 1)


def test_controls(place, tmp_path, capsys, trained):
    """A note that was trained on is skipped; one that is recited all the same is reported."""
    for folder in ("control", "mine"):
        (tmp_path / folder).mkdir()
    known = (place / "notes" / trained[0]).read_bytes()
    (tmp_path / "control/a.md").write_bytes(known)
    (tmp_path / "control/b.md").write_bytes(known + b" And some more.")
    (tmp_path / "mine/new.md").write_text(NEW, encoding="utf-8")
    assert call("audit", place / "run", "--notes", "mine", "--control", "control", *WINDOWS) == NOT_JUDGED
    text, errors = capsys.readouterr()
    assert "a.md" in errors and "b.md" not in errors
    assert "8 documents of 8 are not in mine" in text and "controls, never trained on: 1 document;" in text
    assert "over the threshold" in text


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--window", 100], ["100", "T=64", "--window", "65"]),
        (["--threshold", "1.5"], ["--threshold", "1.5"]),
        (["--encoding-errors", "ignore"], ["--encoding-errors", "ignore"]),
        (["--control", "none", *WINDOWS], ["none"]),
        (["--tokenizer", "none.model"], ["none.model"]),
    ],
)
def test_errors_are_one_line(place, capsys, arguments, mentioned):
    assert call("audit", place / "run", "--notes", place / "notes", *arguments) == 1
    message = error_of(capsys)
    assert all(part in message for part in mentioned)


@pytest.mark.parametrize("option", ["--notes", "--control"])
def test_a_missing_folder_is_refused_before_torch_is_imported(place, option):
    command = [sys.executable, "-X", "importtime", "-m", "niels_gpt", "audit", str(place / "run"), option, "missing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "missing" in done.stderr.splitlines()[-1]
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)


def test_without_a_run_an_imported_base_is_not_audited(place, tmp_path, capsys):
    """The imported model is newer than the run that was trained here."""
    shutil.copytree(place / "run", tmp_path / "runs/mine")
    shutil.copytree(place / "run", tmp_path / "runs/base")
    (tmp_path / "runs/base/source.json").write_text('{"name": "public", "licence": ""}', encoding="utf-8")
    os.utime(tmp_path / "runs/base/config.yaml", (2**31, 2**31))
    assert call("audit", "--notes", place / "notes", *WINDOWS, "--json") == NOT_SAFE
    out, errors = capsys.readouterr()
    assert "runs/mine" in json.loads(out)["checkpoint"] and "base" not in errors
    shutil.rmtree(tmp_path / "runs/mine")
    assert call("audit", "--notes", place / "notes", *WINDOWS) == 1
    assert "no run" in error_of(capsys)


def test_the_page_and_the_report_of_the_run_begin_with_the_verdict(place, tmp_path, capsys, trained):
    """Also of an audit whose settings do not count for an export; at the threshold of the command."""
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    arguments = ["audit", run, "--notes", place / "notes", *WINDOWS, "--threshold", "0.002"]
    assert call(*arguments, "--out", tmp_path / "out") == NOT_SAFE
    page = read((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert page.texts("p")[0].startswith("NOT SAFE") and "P(z) >= 0.002" in page.texts("p")[0]
    assert "0.2%" in page.texts("th") and "probability of 50%" not in " ".join(page.texts("p"))
    passages = [text for text in page.texts("article") if f"{trained[0]}, line " in text]
    assert passages
    assert call("runs", "report", run) == 0
    text = (run / "report.md").read_text(encoding="utf-8").split("## Memorization")[1].split("\n## ")[0]
    assert (
        "NOT SAFE" in text
        and "P(z) >= 0.002" in text
        and f"{trained[0]}, line 3" in text
        and "Not measured" not in text
    )
    verdict = json.loads((tmp_path / "out/audit.json").read_text(encoding="utf-8"))
    assert not any(passage["suffix"] in text for passage in verdict["passages"])
    assert (run / "last-audit.json").stat().st_mode & 0o077 == 0


def test_missing_checkpoints_and_notes(place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for checkpoint, notes in (("none.pt", place / "notes"), ("empty", place / "notes"), (place / "run", "empty")):
        assert call("audit", checkpoint, "--notes", notes, *WINDOWS) == 1
        assert re.search(r"none\.pt|empty", error_of(capsys))


def test_the_run_alone_audits_its_own_data(place, capsys):
    assert call("audit", place / "run", *SMALL_WINDOWS) == NOT_SAFE
    text = capsys.readouterr().out
    assert "read 8 notes" in text and "the run's own data" in text and "one every 5 bytes" in text


def test_a_recited_note_of_another_suffix(place, tmp_path, capsys, trained):
    """A folder with the trained note as .txt and as .MD beside a stray .md."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/stray.md").write_text(NEW, encoding="utf-8")
    for name in ("note.txt", "note.MD"):
        shutil.copy(place / "notes" / trained[0], tmp_path / "mine" / name)
    assert call("audit", place / "run", "--notes", "mine", *WINDOWS) == NOT_SAFE
    text = capsys.readouterr().out
    assert "NOT SAFE TO PUBLISH" in text and "of 2 documents" in text
    named = re.findall(r"  (note\.\w+), line \d\n.*\n.*\n     also in (note\.\w+)$", text, re.MULTILINE)
    assert named and all(set(names) == {"note.txt", "note.MD"} for names in named)
    assert call("audit", place / "run", "--notes", "mine/note.txt", *WINDOWS) == NOT_SAFE
    assert call("audit", place / "run", "--notes", "mine/stray.md", *WINDOWS) == NOT_JUDGED


def test_not_judged_has_its_own_exit_code(place, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/new.md").write_text(NEW, encoding="utf-8")
    (tmp_path / "mine/latin.txt").write_bytes(b"caf\xe9 " * 20)
    (tmp_path / "mine/scan.png").write_bytes(bytes(range(256)))
    arguments = ["audit", place / "run", "--notes", "mine", *WINDOWS]
    assert call(*arguments) == NOT_JUDGED
    text = capsys.readouterr().out
    assert "SAFE TO PUBLISH" not in text and "NOT JUDGED" in text and "--encoding-errors replace" in text
    assert "skipped scan.png: not text (.png)" in text and "latin.txt" in text.split("NOT JUDGED")[1]
    assert call(*arguments, "--json") == NOT_JUDGED
    assert json.loads(capsys.readouterr().out)["verdict"] == "NOT JUDGED"
    assert call(*arguments, "--encoding-errors", "replace") == NOT_JUDGED  # the notes of the run are elsewhere
    assert "latin.txt" not in capsys.readouterr().out.split("NOT JUDGED")[1]


def test_ctrl_c_prints_what_was_found(place, tmp_path):
    """A real process and a real SIGINT, while the audit runs."""
    notes = tmp_path / "many"
    for i in range(40):
        shutil.copytree(place / "notes", notes / str(i))
    command = [
        sys.executable,
        "-c",
        SLOW_SCAN,
        "audit",
        place / "run",
        "--notes",
        notes,
        *SMALL_WINDOWS,
        "--stride",
        "1",
    ]
    command += ["--out", tmp_path / "out"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(niels_gpt.__file__).parent.parent)}
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    for line in process.stderr:
        if "256 of" in line:
            break
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=300)  # less than a second on an idle machine
    assert process.returncode == 130
    assert "passages with the highest P(z), so far" in text and "interrupted after" in text
    assert json.loads((tmp_path / "out/audit.json").read_text("utf-8"))["interrupted"] is True


SLOW_SCAN = """
import sys
from niels_gpt.system import progress
progress.SECONDS_BETWEEN_LINES = 0.02
from niels_gpt.memorization import extraction
import niels_gpt.memorization.audit as audit
def slowly(*arguments, **options):
    import time
    for found in extraction.scan_rows(*arguments, **options):
        yield found
        time.sleep(3600)
audit.scan_rows = slowly
from niels_gpt.cli.main import main
main(sys.argv[1:])
"""
"""Prints progress often, and waits for an hour after the first chunk of passages."""


def test_names_that_are_markup_or_not_utf8(place, tmp_path, capsys, trained):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    (notes / trained[0]).rename(notes / "[red]<b>a\nb.md")
    (notes / trained[1]).rename(notes / b"\xff.md".decode("utf-8", errors="surrogateescape"))
    assert call("audit", place / "run", "--notes", notes, *WINDOWS, "--out", "out") == NOT_SAFE
    output = capsys.readouterr().out
    assert "[red]<b>a" in output and "\\xff.md" in output
    read((tmp_path / "out/report.html").read_text(encoding="utf-8"))
