"""`niels-gpt audit`: which passages of my notes can this checkpoint recite?"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from tests.cli import call, error_of, reciting
from tests.cli.reciting import PROMPT, SMALL_WINDOWS, WINDOW, naive_p, write_notes
from tests.report.pages import read

NOT_SAFE = 3
TRAINED, HELD_OUT, UNKNOWN = "trained on", "held out", "not in the run's data"


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def untrained(tmp_path):
    """A checkpoint that has learned nothing, in no run."""
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": 64, "C": 16, "L": 1, "H": 2, "dropout": 0.0})
    save_checkpoint(tmp_path / "untrained.pt", model, None, 0, model.config)
    return tmp_path / "untrained.pt"


def audit(capsys, checkpoint, notes, *arguments):
    """(exit code, what `--json` prints)."""
    code = call("audit", checkpoint, "--notes", notes, *SMALL_WINDOWS, "--json", *arguments)
    return code, json.loads(capsys.readouterr().out)


def status(result):
    return {d["name"]: d["status"] for d in result["documents"]}


# --- the verdict -------------------------------------------------------------------------------------


def test_a_model_that_recites_is_not_safe(place, capsys, trained):
    code, result = audit(capsys, place / "run", place / "notes")
    assert code == NOT_SAFE
    assert result["safe"] is False
    assert (result["notes_audited"], result["notes_exposed"]) == (8, 2)
    documents = result["documents"]
    assert [d["max_p"] for d in documents] == sorted((d["max_p"] for d in documents), reverse=True)
    assert {d["name"] for d in documents[:2]} == set(trained)
    for d in documents:
        assert d["status"] == (TRAINED if d["name"] in trained else HELD_OUT)
        assert (d["max_p"] > 0.9) == (d["name"] in trained)
    size = sum((place / "notes" / name).stat().st_size for name in trained)
    assert 0.9 * size / 5 - 20 < result["windows_over"] < size / 5 < result["windows"]
    assert result["controls"] == 6


def test_the_passages_are_ranked_and_their_p_is_a_product_of_softmaxes(place, capsys, trained):
    _, result = audit(capsys, place / "run", place / "notes", "--top", 6)
    passages = result["passages"]
    assert len(passages) == 6
    assert [p["p"] for p in passages] == sorted((p["p"] for p in passages), reverse=True)
    for p in passages:
        assert p["document"] in trained
        window = (place / "notes" / p["document"]).read_bytes()[p["start"] : p["start"] + WINDOW]
        assert p["prompt"] + p["suffix"] == window.decode("utf-8", errors="replace")
        assert p["p"] == pytest.approx(naive_p(place / "run/checkpoints/best.pt", list(window), PROMPT), rel=1e-3)
    assert passages[0]["p"] == pytest.approx(result["documents"][0]["max_p"])


def test_what_people_read(place, capsys, trained):
    assert call("audit", place / "run", "--notes", place / "notes", *SMALL_WINDOWS) == NOT_SAFE
    text, errors = capsys.readouterr()
    assert errors == ""
    assert "8 notes audited" in text
    assert "6 held out" in text and "2 trained on" in text
    assert f"passages of {WINDOW} bytes, {PROMPT} of them given" in text
    first = next(line for line in text.splitlines() if line.strip().startswith("1."))
    assert re.search(r"P\(z\) = 0\.9\d+", first)
    assert any(name in first for name in trained)
    assert "controls, never trained on: 6 notes" in text
    assert "NOT SAFE TO PUBLISH" in text
    assert "of 2 notes have P(z) >= 0.001" in text


def test_an_untrained_model_is_safe(place, capsys, untrained):
    code, result = audit(capsys, untrained, place / "notes")
    assert code == 0
    assert result["safe"] is True
    assert (result["notes_audited"], result["notes_exposed"], result["windows_over"]) == (8, 0, 0)
    assert set(status(result).values()) == {UNKNOWN}
    assert "untrained.pt lies in no run" in result["unknown_because"]
    assert all(d["max_p"] < 1e-30 for d in result["documents"])  # 24 bytes by chance
    assert call("audit", untrained, "--notes", place / "notes", *SMALL_WINDOWS) == 0
    text = capsys.readouterr().out
    assert "\nSAFE TO PUBLISH" in text
    assert "--control" in text  # there is nothing to compare with


def test_a_checkpoint_that_does_not_say_what_it_was_trained_on_has_no_controls(tmp_path, capsys, untrained):
    """It was put into a run, but its training data is not recorded: nothing proves that the run's split is its own."""
    place = reciting.copy_to(tmp_path / "copy")
    shutil.copy(untrained, place / "run/checkpoints/best.pt")
    code, result = audit(capsys, place / "run", place / "notes")
    assert (code, result["safe"], result["notes_audited"], result["controls"]) == (0, True, 8, 0)


def test_the_checkpoint_file_is_as_good_as_the_run(place, capsys):
    whole = audit(capsys, place / "run", place / "notes")
    assert audit(capsys, place / "run/checkpoints/best.pt", place / "notes") == whole
    early, _ = audit(capsys, place / "run/checkpoints/step_00000060.pt", place / "notes")
    assert early in (0, NOT_SAFE)


def test_the_threshold(place, capsys):
    code, result = audit(capsys, place / "run", place / "notes", "--threshold", 1)
    assert (code, result["safe"]) == (0, True)  # nothing is certain
    best = result["documents"][0]["max_p"]
    assert audit(capsys, place / "run", place / "notes", "--threshold", best * 1.0001)[0] == 0
    code, result = audit(capsys, place / "run", place / "notes", "--threshold", best * 0.9999)
    assert (code, result["notes_exposed"], result["windows_over"]) == (NOT_SAFE, 1, 1)


@pytest.mark.parametrize("threshold", ["0", "-0.5", "1.5", "nan"])
def test_a_threshold_that_is_no_probability(place, capsys, threshold):
    assert call("audit", place / "run", "--notes", place / "notes", f"--threshold={threshold}", *SMALL_WINDOWS) == 1
    message = error_of(capsys)
    assert "--threshold" in message
    assert threshold in message
    assert call("audit", place / "run", "--notes", place / "notes", "--threshold=some") == 2


def test_the_report_in_a_folder(place, tmp_path, capsys, trained):
    code, result = audit(capsys, place / "run", place / "notes", "--out", "out")
    assert code == NOT_SAFE
    assert json.loads((tmp_path / "out/audit.json").read_text(encoding="utf-8")) == result
    report = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    probabilities = {d["name"]: d["max_p"] for d in report["documents"]}
    assert probabilities == {d["name"]: d["max_p"] for d in result["documents"]}
    assert {d["name"] for d in report["documents"] if d["control"]} == set(status(result)) - set(trained)
    page = read((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert any(trained[0] in cell for cell in page.texts("td"))
    assert (tmp_path / "out/documents.csv").exists() and (tmp_path / "out/windows.csv").exists()


# --- controls ----------------------------------------------------------------------------------------


def test_controls_of_ones_own(place, tmp_path, capsys):
    write_notes(tmp_path / "others", first=1)
    code, result = audit(capsys, place / "run", place / "notes", "--control", "others")
    assert code == NOT_SAFE
    controls = [d for d in result["documents"] if d["status"] == "control"]
    assert len(controls) == 8
    assert result["controls"] == 6 + 8
    assert all(d["max_p"] < 1e-6 for d in controls)
    assert (result["notes_audited"], result["notes_exposed"]) == (8, 2)


def test_controls_do_not_change_the_verdict_but_are_told(place, tmp_path, capsys, trained):
    """A control that is recited too: then such text can be guessed."""
    (tmp_path / "control").mkdir()
    (tmp_path / "mine").mkdir()
    known = (place / "notes" / trained[0]).read_bytes()
    (tmp_path / "control/a.md").write_bytes(known + b" And some more.")  # another text, so it was not trained on
    (tmp_path / "mine/new.md").write_text("Something that is new to the model, and long enough. " * 2, encoding="utf-8")
    assert call("audit", place / "run", "--notes", "mine", "--control", "control", *SMALL_WINDOWS) == 0
    text = capsys.readouterr().out
    assert "\nSAFE TO PUBLISH" in text
    assert "over the threshold too" in text


def test_what_was_trained_on_is_no_control(place, tmp_path, capsys, trained):
    (tmp_path / "control").mkdir()
    shutil.copy(place / "notes" / trained[0], tmp_path / "control/a.md")
    arguments = ["audit", place / "run", "--notes", place / "notes", "--control", "control", *SMALL_WINDOWS]
    assert call(*arguments) == 1
    assert "trained on" in error_of(capsys)
    (tmp_path / "control/b.md").write_text(
        "Something that is new to the model, and long enough. " * 2, encoding="utf-8"
    )
    assert call(*arguments, "--json") == NOT_SAFE
    text, errors = capsys.readouterr()
    assert "a.md" in errors and "b.md" not in errors
    assert [d["name"] for d in json.loads(text)["documents"] if d["status"] == "control"] == ["control: b.md"]


def test_learned_positions_are_tried_at_every_place(tmp_path, capsys):
    torch.manual_seed(0)
    model = GPT({"V": 256, "T": 48, "C": 16, "L": 1, "H": 2, "dropout": 0.0, "positions": "learned"}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(12 if p.dim() > 1 else 1)  # places matter
    save_checkpoint(tmp_path / "m.pt", model, None, 0, model.config)
    (tmp_path / "notes").mkdir()
    texts = {"long.md": b"a note of some words, longer than a window", "short.md": b"less than a window"}
    for name, text in texts.items():
        (tmp_path / "notes" / name).write_bytes(text)
    _, result = audit(capsys, tmp_path / "m.pt", "notes")
    found = {d["name"]: d["max_log_p"] for d in result["documents"]}
    for name, text in texts.items():
        window = min(WINDOW, len(text))
        prompt = PROMPT if window == WINDOW else PROMPT * window // WINDOW
        best = -float("inf")
        for start in range(len(text) - window + 1):
            if start % 5 and start != len(text) - window:
                continue
            ids = torch.tensor([list(text[start : start + window])])
            for place in range(48 - (window - 1) + 1):
                positions = torch.arange(place, place + window - 1)[None]
                with torch.no_grad():
                    logs = model(ids[:, :-1], positions=positions)[0].double().log_softmax(-1)
                best = max(best, sum(logs[i - 1, ids[0, i]].item() for i in range(prompt, window)))
        assert found[name] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("folder", ["none", "empty"])
def test_a_folder_of_controls_without_notes(place, tmp_path, capsys, folder):
    (tmp_path / "empty").mkdir()
    assert call("audit", place / "run", "--notes", place / "notes", "--control", folder, *SMALL_WINDOWS) == 1
    assert folder in error_of(capsys)


# --- mistakes ----------------------------------------------------------------------------------------


def test_folders_without_notes(place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank/a.md").write_text("", encoding="utf-8")
    (tmp_path / "blank/a.txt").write_text("not a note, by its name", encoding="utf-8")
    (tmp_path / "file.md").write_text("a file, not a folder", encoding="utf-8")
    for folder in ("empty", "blank", "none", "file.md"):
        assert call("audit", place / "run", "--notes", folder, *SMALL_WINDOWS) == 1
        assert folder in error_of(capsys)
    assert call("audit", place / "run") == 2  # whose notes?


def test_notes_that_are_not_utf8(place, tmp_path, capsys, trained):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    (notes / "latin.md").write_bytes(b"caf\xe9 au lait, and more words than a window has in it, so that it counts.")
    assert call("audit", place / "run", "--notes", notes, *SMALL_WINDOWS) == 1
    message = error_of(capsys)
    assert "latin.md is not utf-8: byte 0xe9 at offset 3" in message
    assert "--encoding-errors replace" in message
    code, result = audit(capsys, place / "run", notes, "--encoding-errors", "replace")
    assert code == NOT_SAFE
    assert status(result)["latin.md"] == UNKNOWN
    assert status(result)[trained[0]] == TRAINED


def test_an_unknown_way_with_what_is_not_utf8(place, capsys):
    """As in `train`."""
    arguments = ["--notes", place / "notes", *SMALL_WINDOWS, "--encoding-errors", "ignore"]
    assert call("audit", place / "run", *arguments) in (1, 2)
    assert "ignore" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--window", 100], "windows of 100 tokens do not fit a model of T=64: set --window to 65 or less"),
        (["--window", 20, "--prompt", 20], "prompt"),
        (["--device", "tpu"], "tpu"),
        (["--tokenizer", "none.model"], "none.model"),
    ],
)
def test_what_does_not_fit_is_one_line(place, capsys, arguments, mentioned):
    assert call("audit", place / "run", "--notes", place / "notes", *arguments) == 1
    assert mentioned in error_of(capsys)


def test_no_such_checkpoint(place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.pt").write_text("no weights", encoding="utf-8")
    for checkpoint in ("none.pt", "empty", "bad.pt"):
        assert call("audit", checkpoint, "--notes", place / "notes", *SMALL_WINDOWS) == 1
        assert checkpoint in error_of(capsys)


def test_names_that_are_markup(place, tmp_path, capsys, trained):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    (notes / trained[0]).rename(notes / "[red]<b>a\nb.md")
    code, result = audit(capsys, place / "run", notes, "--out", "out")
    assert code == NOT_SAFE
    assert status(result)["[red]<b>a\nb.md"] == TRAINED
    read((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert call("audit", place / "run", "--notes", notes, *SMALL_WINDOWS) == NOT_SAFE
    assert "[red]<b>a" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"], ["--out", "out"]])
def test_a_name_that_is_not_utf8(place, tmp_path, capsys, trained, more):
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    (notes / trained[1]).rename(notes / b"\xff.md".decode("utf-8", errors="surrogateescape"))
    assert call("audit", place / "run", "--notes", notes, *SMALL_WINDOWS, *more) == NOT_SAFE


def test_a_note_of_two_letters_alarms_no_one(place, tmp_path, capsys, untrained):
    """One of 256 bytes is guessed in 256 tries, by a model that knows nothing: that is no memory."""
    notes = tmp_path / "notes"
    shutil.copytree(place / "notes", notes)
    (notes / "stub.md").write_text("ok", encoding="utf-8")
    assert audit(capsys, untrained, notes)[0] == 0
