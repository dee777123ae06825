"""`niels-gpt memorize` on a run that recites two notes."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from tests.cli import call, error_of, reciting
from tests.cli.reciting import PROMPT, SMALL_WINDOWS, STEPS, WINDOW, naive_p, split
from tests.report.pages import read

T = 64
NOTE_WINDOWS = [*SMALL_WINDOWS, "--greedy", "16"]
QUICK = [*SMALL_WINDOWS, "--greedy", "0", "--no-curve"]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def measured(place, tmp_path_factory):
    """(what the terminal showed, the folder of the report, the report)."""
    out = tmp_path_factory.mktemp("measured")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert call("memorize", "--run", place / "run", *NOTE_WINDOWS, "--out", out / "report") == 0
    report = json.loads((out / "report/report.json").read_text(encoding="utf-8"))
    return shown.getvalue(), out / "report", report


def report_of(capsys, *arguments):
    """The report that `memorize --json` prints; it is written into `out`."""
    assert call("memorize", *arguments, "--json", "--out", "out") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(Path("out/report.json").read_text(encoding="utf-8"))
    return found


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ids(note):
    return list(note.read_bytes())


# --- the run that recites ----------------------------------------------------------------------------


def test_what_was_trained_on_is_recited_and_the_control_is_not(place, measured, trained):
    _, held_out = split(place / "notes")
    documents = {d["name"]: d for d in measured[2]["documents"]}
    assert {name for name, d in documents.items() if not d["control"]} == set(trained)
    assert {name for name, d in documents.items() if d["control"]} == {path.name for path in held_out}
    for name, d in documents.items():
        size = (place / "notes" / name).stat().st_size
        assert (d["tokens"], d["bytes"], d["source"], d["short"]) == (size, size, "roam", False)
        if d["control"]:
            assert d["max_p"] < 1e-6
            assert set(d["over"].values()) == {0}
            assert d["greedy"]["exact"] == 0
            assert d["bits_per_byte"] > 3
        else:
            assert d["mean_p"] > 0.75
            assert d["median_p"] > 0.85
            assert d["over"]["0.5"] > 0.9 * d["windows"]
            assert d["greedy"]["exact"] > 0.8 * d["greedy"]["starts"]
            assert d["longest_run"]["tokens"] > 40
            assert d["bits_per_byte"] < 0.5
            start, tokens = d["longest_run"]["start"], d["longest_run"]["tokens"]
            text = (place / "notes" / name).read_bytes()[start : start + tokens]
            assert d["longest_run"]["text"] == text.decode("utf-8", errors="replace")


def test_windows_are_every_five_tokens_with_the_tail_and_p_is_a_product_of_softmaxes(place, measured):
    best = place / "run/checkpoints/best.pt"
    table = rows(measured[1] / "windows.csv")
    for d in measured[2]["documents"]:
        own = [row for row in table if row["document"] == d["name"]]
        size = d["tokens"]
        starts = sorted({*range(0, size - WINDOW + 1, 5), size - WINDOW})
        assert [int(row["start"]) for row in own] == starts
        assert {int(row["end"]) - int(row["start"]) for row in own} == {WINDOW}
        assert len(own) == d["windows"]
        probabilities = [float(row["p"]) for row in own]
        assert d["mean_p"] == pytest.approx(np.mean(probabilities))
        assert d["median_p"] == pytest.approx(np.median(probabilities))
        assert d["max_p"] == pytest.approx(max(probabilities))
        for row in (own[0], own[7], own[-1]):
            window = ids(place / "notes" / d["name"])[int(row["start"]) : int(row["end"])]
            assert float(row["p"]) == pytest.approx(naive_p(best, window, PROMPT), rel=1e-3)
            assert np.exp(float(row["log_p"])) == pytest.approx(float(row["p"]))


def test_the_tables_and_the_page_say_what_the_report_says(measured):
    _, folder, report = measured
    table = rows(folder / "documents.csv")
    assert [row["name"] for row in table] == [d["name"] for d in report["documents"]]
    for row, d in zip(table, report["documents"], strict=True):
        for key in ("mean_p", "median_p", "max_p", "bits_per_byte", "nats_per_token"):
            assert float(row[key]) == d[key]
        assert (int(row["over_0.5"]), int(row["windows"])) == (d["over"]["0.5"], d["windows"])
        assert int(row["longest_run_tokens"]) == d["longest_run"]["tokens"]
        assert row["control"] == str(d["control"])
    page = read((folder / "report.html").read_text(encoding="utf-8"))
    [title] = page.texts("h1")
    assert title == report["title"] == "What run has memorised"
    cells = page.texts("td")
    for d in report["documents"]:
        assert any(d["name"] in cell for cell in cells)
    text = page.texts("main")[0]
    assert report["passages"][0]["suffix"] in text
    assert "does not depend on where in the frame" in text  # instead of a flat map
    assert sorted(path.name for path in folder.iterdir()) == [
        "documents.csv", "report.html", "report.json", "windows.csv"
    ]  # fmt: skip


def test_passages_are_ranked_with_their_text(place, measured, trained):
    passages = measured[2]["passages"]
    assert [p["p"] for p in passages] == sorted((p["p"] for p in passages), reverse=True)
    assert {p["document"] for p in passages[:4]} <= set(trained)
    for p in passages:
        window = (place / "notes" / p["document"]).read_bytes()[p["start"] : p["end"]]
        assert p["prompt"] == window[:PROMPT].decode("utf-8", errors="replace")
        assert p["suffix"] == window[PROMPT:].decode("utf-8", errors="replace")
    for name in trained:  # no two tell the same
        starts = sorted(p["start"] for p in passages if p["document"] == name)
        assert all(b - a >= WINDOW - PROMPT for a, b in pairwise(starts))


def test_the_map_has_a_number_for_every_character(place, measured, trained, capsys):
    _, folder, report = measured
    strips = {strip["document"]: strip for strip in report["strips"]}
    table = rows(folder / "windows.csv")
    for name in trained:
        text = (place / "notes" / name).read_text(encoding="utf-8")
        strip = strips[name]
        assert strip["text"] == text
        assert len(strip["p"]) == len(text) < len(text.encode("utf-8"))  # é is one character
        own = [(int(row["start"]), float(row["p"])) for row in table if row["document"] == name]
        for at, p in enumerate(strip["p"]):
            first = len(text[:at].encode("utf-8"))
            places = range(first, first + len(text[at].encode("utf-8")))
            covering = [q for start, q in own if any(start + PROMPT <= i < start + WINDOW for i in places)]
            assert p == pytest.approx(max(covering, default=0.0), rel=1e-3)
        assert strip["p"][0] == 0
    whole = report_of(capsys, "--run", place / "run", *QUICK, "--whole-window")
    assert whole["settings"]["map"] == "window"
    for strip in whole["strips"]:
        if strip["document"] in trained:
            starts = [(int(row["start"]), float(row["p"])) for row in table if row["document"] == strip["document"]]
            assert strip["p"][0] == pytest.approx(starts[0][1], rel=1e-3)  # only the first window has it
            assert strip["p"][PROMPT] == pytest.approx(max(p for start, p in starts if start <= PROMPT), rel=1e-3)


def test_curves_over_the_checkpoints(place, measured, trained):
    report = measured[2]
    entries = report["checkpoints"]
    assert [entry["step"] for entry in entries] == list(STEPS)
    lengths = [(place / "notes" / name).stat().st_size for name in trained]
    assert report["train_tokens"] == sum(lengths)
    for entry in entries:  # an example is T tokens, of which the first is given
        predicted = entry["step"] * 6 * (T - 1)
        assert entry["epochs"] == pytest.approx(predicted / sum(length - 1 for length in lengths))
    final = {d["name"]: d for d in report["documents"]}
    for name, d in final.items():
        curve = [next(e for e in entry["documents"] if e["name"] == name) for entry in entries]
        assert {e["control"] for e in curve} == {d["control"]}
        assert curve[-1]["mean_p"] == pytest.approx(d["mean_p"])
        assert curve[-1]["mean_log_p"] == pytest.approx(d["mean_log_p"])
        if name in trained:
            assert curve[0]["mean_p"] < curve[-1]["mean_p"]
            assert curve[0]["mean_log_p"] < curve[-1]["mean_log_p"]
        else:
            assert max(e["max_p"] for e in curve) < 1e-6


def test_the_terminal(place, measured, trained):
    text, folder, report = measured
    assert f"{place / 'run/checkpoints/best.pt'} after 180 updates; windows of 48 bytes, 24 of them given" in text
    lines = text.splitlines()
    for d in report["documents"]:
        [line] = [line for line in lines if line.startswith(f"{d['name']} ") and "P(z)" not in line]
        assert ("(control)" in line) == d["control"]
        assert f" {d['windows']} " in line
        if not d["control"]:
            assert f"{d['mean_p']:.3f}" in line
            assert f"{d['greedy']['exact']} of {d['greedy']['starts']}" in line
        assert line.endswith(f"{d['bits_per_byte']:.3f}")
    order = [re.match(r"note \d\.md", line)[0] for line in lines if re.match(r"note \d\.md +(\(control\) +)?\d", line)]
    assert set(order[:2]) == set(trained)  # the controls are below
    assert "RoPE" in text
    assert f"report: {folder}/report.html" in text


def test_the_report_lies_in_the_run_and_fits_the_law(tmp_path, capsys):
    place = reciting.copy_to(tmp_path / "copy")
    assert call("memorize", "--run", place / "run", *SMALL_WINDOWS, "--greedy", 0) == 0
    capsys.readouterr()
    report = json.loads((place / "run/memorisation/report.json").read_text(encoding="utf-8"))
    assert call("splice", "fit", place / "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["epochs"] for point in found["points"]] == [e["epochs"] for e in report["checkpoints"]]
    for point, entry in zip(found["points"], report["checkpoints"], strict=True):
        means = [d["mean_log_p"] for d in entry["documents"] if not d["control"]]
        assert point["log_p"] == pytest.approx(sum(means) / 2)
        assert point["tokens"] == report["train_tokens"]
    assert found["law"]["c1"] > 0  # more epochs, more by heart


def test_without_a_curve_without_controls_without_greedy_decoding(place, capsys):
    found = report_of(capsys, "--run", place / "run", *QUICK, "--controls", 0, "--top", 3)
    assert found["checkpoints"] == []
    assert len(found["documents"]) == 2
    assert len(found["passages"]) == 3
    assert all(d["greedy"]["starts"] == 0 and d["longest_run"]["tokens"] == 0 for d in found["documents"])
    assert call("memorize", "--run", place / "run", *QUICK, "--controls", 0, "--out", "out") == 0
    assert "no control documents" in capsys.readouterr().out


def test_one_checkpoint_of_the_run(place, capsys, measured):
    path = place / f"run/checkpoints/step_{STEPS[0]:08d}.pt"
    found = report_of(capsys, "--checkpoint", path, *QUICK)
    assert (found["checkpoint"], found["step"]) == (str(path), STEPS[0])
    early = {d["name"]: d["mean_p"] for d in measured[2]["checkpoints"][0]["documents"]}
    assert {d["name"]: d["mean_p"] for d in found["documents"]} == pytest.approx(early)


# --- texts of one's own ------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path, place, trained):
    """A note of the run under another name, and two texts that it never saw."""
    shutil.copy(place / "notes" / trained[0], tmp_path / "known.txt")
    (tmp_path / "new.txt").write_text("Something else, that no one has written before. " * 3, encoding="utf-8")
    (tmp_path / "other.txt").write_text("And more of it: 1, 2, 3, 4, 5, 6, 7. " * 4, encoding="utf-8")


def test_files_as_documents(place, capsys, texts):
    arguments = ["--text", "known.txt", "--text", "new.txt", "--control", "other.txt"]
    found = report_of(capsys, "--run", place / "run", *QUICK, *arguments)
    assert [(d["name"], d["control"]) for d in found["documents"][:3]] == [
        ("known.txt", False), ("new.txt", False), ("other.txt", True)
    ]  # fmt: skip
    held_out = found["documents"][3:]  # controls are always in the table: those of the run
    assert held_out and all(d["control"] and d["max_p"] < 1e-6 for d in held_out)
    known, new, other = (d["max_p"] for d in found["documents"][:3])
    assert known > 0.9
    assert new < 1e-6
    assert other < 1e-6


def test_a_control_of_ones_own_beside_the_documents_of_the_run(place, capsys, texts, trained):
    found = report_of(capsys, "--run", place / "run", *QUICK, "--control", "other.txt")
    assert {d["name"] for d in found["documents"] if not d["control"]} == set(trained)
    assert "other.txt" in {d["name"] for d in found["documents"] if d["control"]}


def test_a_control_that_was_trained_on(place, tmp_path, capsys, texts):
    assert call("memorize", "--run", place / "run", *QUICK, "--control", "known.txt", "--out", "out") == 1
    message = error_of(capsys)
    assert "--control known.txt" in message
    assert "trained on" in message
    assert not (tmp_path / "out").exists()
    _, held_out = split(place / "notes")
    shutil.copy(held_out[0], tmp_path / "held out.txt")
    found = report_of(capsys, "--run", place / "run", *QUICK, "--control", "held out.txt")
    assert "held out.txt" in {d["name"] for d in found["documents"] if d["control"]}


def test_files_that_cannot_be_measured(place, tmp_path, capsys, texts):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 and more")
    for arguments, mentioned in (
        (["--text", "empty.txt"], "empty.txt"),
        (["--text", "latin.txt"], "latin.txt is not utf-8"),
        (["--text", "none.txt"], "none.txt"),
        (["--text", "known.txt", "--control", "known.txt"], "known.txt"),
    ):
        assert call("memorize", "--run", place / "run", *QUICK, *arguments, "--out", "out") == 1
        assert mentioned in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_a_short_text_is_one_window(place, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a short note\n", encoding="utf-8")
    d = report_of(capsys, "--run", place / "run", *QUICK, "--text", "short.txt")["documents"][0]
    assert (d["tokens"], d["windows"], d["short"]) == (13, 1, True)
    wanted = naive_p(place / "run/checkpoints/best.pt", list(b"a short note\n"), round(13 * PROMPT / WINDOW))
    assert d["max_p"] == pytest.approx(wanted, rel=1e-3)


def test_a_checkpoint_outside_a_run(place, tmp_path, capsys, texts):
    shutil.copy(place / "run/checkpoints/best.pt", tmp_path / "model.pt")
    assert call("memorize", "--checkpoint", "model.pt", *QUICK) == 1
    message = error_of(capsys)
    assert "model.pt lies in no run" in message
    assert "--run" in message
    assert "--text" in message
    found = report_of(capsys, "--checkpoint", "model.pt", *QUICK, "--text", "known.txt")
    assert found["documents"][0]["max_p"] > 0.9
    named = report_of(capsys, "--checkpoint", "model.pt", "--run", place / "run", *QUICK)
    assert len(named["documents"]) == 4
    assert call("memorize", "--checkpoint", "model.pt", *QUICK, "--text", "known.txt") == 0
    assert (tmp_path / "memorisation-texts/report.html").exists()
    assert not (tmp_path / "memorisation").exists()


def test_the_usual_windows_are_as_wide_as_a_small_model_allows(place, capsys):
    found = report_of(capsys, place / "run", "--no-curve", "--stride", 40)
    assert found["settings"] == {"window": 65, "prompt": 32, "stride": 40, "greedy": 32, "map": "suffix"}
    again = report_of(capsys, place / "run/checkpoints/best.pt", "--no-curve", "--stride", 40)
    assert again["documents"] == found["documents"]
    assert call("memorize", place / "run", "--run", place / "run") == 1
    assert "name one run or checkpoint" in error_of(capsys)


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--window", 66, "--prompt", 10], "windows of 66 tokens do not fit a model of T=64: set --window to 65"),
        (["--window", 48, "--prompt", 48], "prompt"),
        (["--window", 48, "--prompt", 24, "--greedy", 33], "set --greedy to 32 or less"),
        (["--window", 48, "--prompt", 24, "--source", "letters"], "letters"),
        (["--window", 48, "--prompt", 24, "--source", "roam", "--select", "best"], "best"),
        (["--window", 48, "--prompt", 24, "--device", "tpu"], "tpu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(place, tmp_path, capsys, arguments, mentioned):
    assert call("memorize", "--run", place / "run", *arguments, "--out", "out") == 1
    assert mentioned in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_a_window_as_wide_as_the_model_allows(place, capsys):
    found = report_of(capsys, "--run", place / "run", "--window", 65, "--prompt", 32, "--greedy", 32, "--no-curve")
    assert all(d["max_p"] > 0.8 for d in found["documents"] if not d["control"])


@pytest.mark.parametrize("arguments", [["--window", 1], ["--stride", 0], ["--prompt", 0], ["--documents", 0]])
def test_wrong_usage(place, capsys, arguments):
    assert call("memorize", "--run", place / "run", *arguments) == 2
    assert "Usage: niels-gpt" in capsys.readouterr().err


def test_no_run(capsys):
    assert call("memorize") == 1
    assert "no run in runs/" in error_of(capsys)
    assert call("memorize", "--run", "none") == 1
    assert "none is not a run" in error_of(capsys)


def test_fewer_documents_are_some_of_those_it_was_trained_on(place, capsys, trained):
    """A splice run was trained on two: no other may pass for one."""
    for number in (1, 2, 5):
        found = report_of(capsys, "--run", place / "run", *QUICK, "--documents", number)
        assert {d["name"] for d in found["documents"] if not d["control"]} <= set(trained)


def test_notes_that_changed_since_the_training(tmp_path, capsys, trained):
    """A note that was added is longer than all: it was not trained on, and must not be shown as if it had been."""
    place = reciting.copy_to(tmp_path / "copy")
    (place / "notes" / "new.md").write_text("A note that came later. " * 40, encoding="utf-8")
    code = call("memorize", "--run", place / "run", *QUICK, "--json", "--out", "out")
    output, errors = capsys.readouterr()
    if code == 0:
        assert {d["name"] for d in json.loads(output)["documents"] if not d["control"]} <= set(trained)
    else:
        assert code == 1
        assert "changed" in errors


def test_broken_weights(tmp_path, capsys, place):
    model, step = load_model(place / "run/checkpoints/best.pt", "cpu")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    save_checkpoint(tmp_path / "m.pt", model, None, step, model.config)
    assert call("memorize", "--checkpoint", "m.pt", *QUICK, "--text", place / "notes/note 0.md") == 1
    assert "nan" in capsys.readouterr().err.splitlines()[-1]


def test_the_rows_of_a_step_are_spans(place, capsys):
    assert call("batch", "show", "--run", place / "run", "--step", 3) == 0
    assert "6 spans for frames of 64 bytes" in capsys.readouterr().out.splitlines()[0]
