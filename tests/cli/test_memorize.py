"""`niels-gpt research memorize`: options, printed output, written files, errors."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from niels_gpt.system.checked_json import read_checked_json
from tests.cli import call, error_of, reciting
from tests.cli.reciting import PROMPT, SMALL_WINDOWS, STEPS, WINDOW, naive_p, split
from tests.report.pages import read

QUICK = [*SMALL_WINDOWS, "--greedy", "0", "--no-curve", "--stride", "20"]

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def measured(place, tmp_path_factory):
    """(printed text, folder of the report, report)."""
    out = tmp_path_factory.mktemp("measured")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        options = [*SMALL_WINDOWS, "--greedy", "16", "--stride", "10"]
        assert call("research", "memorize", "--run", place / "run", *options, "--out", out / "report") == 0
    report = json.loads((out / "report/report.json").read_text(encoding="utf-8"))
    return shown.getvalue(), out / "report", report


def report_of(capsys, *arguments):
    """Return the report that `memorize --json` prints and writes into `out`."""
    assert call("research", "memorize", *arguments, "--json", "--out", "out") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(Path("out/report.json").read_text(encoding="utf-8"))
    assert report.pop("checksum") and report == read_checked_json("out/report.json")
    return report


def names(report, *, control=False):
    return {d["name"] for d in report["documents"] if d["control"] is control}


def test_trained_documents_are_recited_and_controls_are_not(place, measured, trained):
    report = measured[2]
    assert names(report) == set(trained)
    assert names(report, control=True) == {path.name for path in split(place / "notes")[1]}
    for d in report["documents"]:
        if d["control"]:
            assert d["max_p"] < 1e-6 and d["greedy"]["exact"] == 0 and d["bits_per_byte"] > 3
        else:
            assert d["mean_p"] > 0.4 and d["greedy"]["exact"] > 0.8 * d["greedy"]["starts"]
            assert d["longest_run"]["tokens"] > 40 and d["bits_per_byte"] < 0.5
    assert [entry["step"] for entry in report["checkpoints"]] == list(STEPS)


def test_files_of_the_report(place, measured):
    _, folder, report = measured
    page = read((folder / "report.html").read_text(encoding="utf-8"))
    assert page.texts("h1") == [report["title"]] == ["What run has memorized"]
    assert report["passages"][0]["suffix"] in page.texts("main")[0]
    with (folder / "windows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for d in report["documents"]:
        windows = [row for row in rows if row["document"] == d["name"]]
        starts = {*range(0, d["tokens"] - WINDOW + 1, 10), d["tokens"] - WINDOW}
        assert [int(row["start"]) for row in windows] == sorted(starts)
        last = list((place / "notes" / d["name"]).read_bytes())[-WINDOW:]
        expected = naive_p(place / "run/checkpoints/best.pt", last, PROMPT)
        assert float(windows[-1]["p"]) == pytest.approx(expected, rel=1e-3)


def test_printed_text(place, measured, trained):
    text, folder, report = measured
    lines = text.splitlines()
    assert lines[0].startswith(f"{place / 'run/checkpoints/best.pt'} after {STEPS[-1]} steps")
    assert f"{WINDOW} bytes, {PROMPT} of them" in lines[0]
    for d in report["documents"]:
        [line] = [line for line in lines if line.startswith(f"{d['name']} ") and "P(z)" not in line]
        assert ("(control)" in line) == d["control"]
        assert f" {d['windows']} " in line
        if not d["control"]:
            assert f"{d['mean_p']:.3f}" in line
            assert f"{d['greedy']['exact']} of {d['greedy']['starts']}" in line
        assert line.endswith(f"{d['bits_per_byte']:.3f}")
    order = [line[: len("note 0.md")] for line in lines if re.match(r"note \d\.md +(\(control\) +)?\d", line)]
    assert set(order[:2]) == set(trained)  # the controls are below
    assert len([line for line in lines if line.startswith("  suffix")]) == 3
    best = report["passages"][0]
    [shown] = [line for line in lines if f"{best['start']} to {best['end']}: " in line and best["document"] in line]
    assert f"P(z) = {best['p']:.3f}" in shown
    assert "RoPE" in text and f"report: {folder}/report.html" in text
    assert "no control documents" not in text


def test_default_folder_of_the_report_and_its_law(tmp_path, capsys):
    copy = reciting.copy_to(tmp_path / "copy")
    assert call("research", "memorize", "--run", copy / "run", *SMALL_WINDOWS, "--stride", 20, "--greedy", 0) == 0
    report = json.loads((copy / "run/memorization/report.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    assert call("research", "splice", "fit", copy / "run", "--json") == 0
    fit = json.loads(capsys.readouterr().out)
    assert [point["epochs"] for point in fit["points"]] == [entry["epochs"] for entry in report["checkpoints"]]
    assert fit["law"]["c1"] > 0  # more epochs, more memorized


def test_options(place, capsys, trained):
    report = report_of(capsys, "--run", place / "run", *QUICK, "--controls", 0, "--top", 3, "--documents", 1)
    assert (report["checkpoints"], len(report["passages"])) == ([], 3)
    assert names(report) == {trained[0]} and not names(report, control=True)
    assert report["documents"][0]["greedy"]["starts"] == 0
    assert call("research", "memorize", "--run", place / "run", *QUICK, "--controls", 0, "--out", "out") == 0
    assert "no control documents" in capsys.readouterr().out
    report = report_of(capsys, "--run", place / "run", *QUICK, "--whole-window")
    assert report["settings"]["map"] == "window" and report["strips"][0]["p"][0] > 0


def test_a_checkpoint_and_default_windows(place, capsys):
    path = place / f"run/checkpoints/step_{STEPS[0]:08d}.pt"
    report = report_of(capsys, path, "--no-curve", "--stride", 40)
    assert (report["checkpoint"], report["step"]) == (str(path), STEPS[0])
    assert report["settings"] == {"window": 65, "prompt": 32, "stride": 40, "greedy": 32, "map": "suffix"}

    assert call("research", "memorize", place / "run", "--run", path) == 1
    assert re.search("--run .*name the same thing", error_of(capsys))


# --- files -------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path, place, trained):
    """A note of the run under another name, and two texts that the model never saw."""
    shutil.copy(place / "notes" / trained[0], tmp_path / "known.txt")
    (tmp_path / "new.txt").write_text("Something else, that no one has written before. " * 3, encoding="utf-8")
    (tmp_path / "other.txt").write_text("And more of it: 1, 2, 3, 4, 5, 6, 7. " * 4, encoding="utf-8")


def test_files_as_documents_and_controls(place, capsys, texts, trained):
    arguments = ["--text", "known.txt", "--text", "new.txt", "--control", "other.txt"]
    report = report_of(capsys, "--run", place / "run", *QUICK, *arguments)
    assert [(d["name"], d["control"]) for d in report["documents"][:3]] == [
        ("known.txt", False), ("new.txt", False), ("other.txt", True),
    ]  # fmt: skip
    known, new, other, *held_out = (d["max_p"] for d in report["documents"])
    assert known > 0.5 and max(new, other, *held_out) < 1e-6
    assert len(held_out) == 2  # those of the run
    report = report_of(capsys, "--run", place / "run", *QUICK, "--control", "other.txt")
    assert names(report) == set(trained) and "other.txt" in names(report, control=True)
    Path("short.txt").write_text("a short note\n", encoding="utf-8")
    assert call("research", "memorize", "--run", place / "run", *QUICK, "--text", "short.txt", "--out", "out") == 0
    assert "short.txt (short) " in capsys.readouterr().out


def test_a_checkpoint_outside_a_run(place, tmp_path, capsys, texts):
    shutil.copy(place / "run/checkpoints/best.pt", tmp_path / "model.pt")
    assert call("research", "memorize", "--checkpoint", "model.pt", *QUICK) == 1
    assert "model.pt" in error_of(capsys)
    assert call("research", "memorize", "--checkpoint", "model.pt", *QUICK, "--text", "known.txt") == 0
    assert "no held-out documents" in capsys.readouterr().err
    assert (tmp_path / "memorization-texts/report.html").exists()
    assert not (tmp_path / "memorization").exists()


def test_learned_positions_have_a_table(tmp_path, capsys, place):
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": 64, "C": 16, "L": 1, "H": 2, "dropout": 0.0, "positions": "learned"})
    save_checkpoint(tmp_path / "m.pt", model, None, 0, model.config)
    assert (
        call(
            "research", "memorize", "--checkpoint", "m.pt", *QUICK, "--text", place / "notes/note 0.md", "--out", "out"
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "RoPE" not in text
    position_map = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))["position_map"]
    [head] = [line for line in text.splitlines() if "best of all" in line]
    assert [int(word) for word in head.split()[1:-3]] == position_map["offsets"]
    assert f" at {position_map['documents'][0]['best_offset']}" in text


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--window", 66, "--prompt", 10], ["66", "T=64", "--window", "65"]),
        ([*QUICK, "--source", "letters"], ["letters"]),
        ([*QUICK, "--select", "best"], ["--select", "best"]),
        ([*QUICK, "--control", "none.txt"], ["none.txt"]),
        ([*QUICK, "--encoding-errors", "ignore"], ["--encoding-errors", "ignore", "skip"]),
    ],
)
def test_errors_are_one_line(place, tmp_path, capsys, arguments, mentioned):
    assert call("research", "memorize", "--run", place / "run", *arguments, "--out", "out") == 1
    message = error_of(capsys)
    assert all(part in message for part in mentioned)
    assert not (tmp_path / "out").exists()


def test_nan_weights(tmp_path, capsys, place):
    model, step = load_model(place / "run/checkpoints/best.pt", "cpu")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    save_checkpoint(tmp_path / "m.pt", model, None, step, model.config)
    assert call("research", "memorize", "--checkpoint", "m.pt", *QUICK, "--text", place / "notes/note 0.md") == 1
    assert "nan" in capsys.readouterr().err.splitlines()[-1]


def test_batch_show_of_a_splice_run(place, capsys):
    assert call("research", "batch", "show", "--run", place / "run", "--step", 3) == 0
    assert "6 spans" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("option", [["--source", "roam"], ["--documents", "2"], ["--select", "first"]])
def test_files_and_a_selection_of_documents_exclude_each_other(place, tmp_path, capsys, option):
    (tmp_path / "a.md").write_text("Some words that are long enough.", encoding="utf-8")
    assert call("research", "memorize", place / "run", "--text", tmp_path / "a.md", *option) == 1
    message = error_of(capsys)
    assert "--text" in message and option[0] in message
