"""`niels-gpt research trace`: the overlaps of a text with the training text, in the terminal and as JSON."""

import json
import shutil

import pytest

from niels_gpt.cli.trace import split_words
from tests.cli import call, error_of, piped, reciting

UNSEEN = "Nothing of this sentence, which has many words, was ever part of a note that the run was trained on."


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


@pytest.fixture(scope="module")
def place():
    return reciting.folder()


@pytest.fixture(scope="module")
def note(place):
    """A note that the run was trained on."""
    return place / "notes" / reciting.longest(reciting.split(place / "notes")[0], 2)[0]


def traced(capsys, *arguments):
    assert call("research", "trace", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_spans_documents_and_what_is_usual(place, note, capsys):
    text = note.read_text(encoding="utf-8")
    result = traced(capsys, f"{UNSEEN} {text[10:90]}", place / "run")
    (span,) = result["spans"]
    assert result["recites"] is True
    assert (span["length"], span["text"]) in [(80, text[10:90]), (81, f" {text[10:90]}")]
    (passage,) = span["passages"]
    assert (passage["source"], passage["file"], passage["document"]) == ("roam", str(note), note.name)
    assert passage["before"] + passage["text"] + passage["after"] in text
    assert result["share"] == pytest.approx(span["length"] / result["characters"])
    assert [length > 0 for length in result["lengths"]].index(True) == span["start"]
    assert result["usual"][0]["source"] == "roam" and result["usual"][0]["high_longest"] < 80
    assert traced(capsys, UNSEEN, place / "run")["recites"] is False


def test_the_terminal_shows_verdict_and_passages(place, note, capsys):
    text = note.read_text(encoding="utf-8")
    assert call("research", "trace", text, place / "run") == 0
    output = capsys.readouterr().out
    assert output.startswith("recites: 100%") and str(note) in output and "held-out text of roam" in output
    assert call("research", "trace", UNSEEN, place / "run", "--quiet") == 0
    assert capsys.readouterr().out.startswith("does not recite")


def test_standard_input_and_either_order(place, note, capsys, monkeypatch):
    data = note.read_bytes()
    for words in (["-", place / "run"], [place / "run", "-"], ["-", "--run", place / "run"]):
        piped(monkeypatch, data)
        assert traced(capsys, *words)["share"] == 1


def test_the_newest_run_is_the_default(place, note, capsys, workdir):
    (workdir / "runs").mkdir()
    shutil.copytree(place / "run", workdir / "runs" / "mine")
    assert traced(capsys, note.read_text(encoding="utf-8"))["share"] == 1


def test_words_are_a_text_and_a_run(place):
    run = place / "run"
    assert split_words(["a text"]) == ("a text", None)
    assert split_words(["a text", str(run)]) == split_words([str(run), "a text"]) == ("a text", run)
    for words in (["two", "words"], ["three", "more", "words"]):
        with pytest.raises(ValueError, match="quote"):
            split_words(words)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["", "RUN"], "empty"), (["some text", "nowhere"], "is not a run"), (["x", "RUN", "--min-length", "5"], "24")],
)
def test_bad_input_is_one_line(place, capsys, arguments, reason):
    words = [str(place / "run") if word == "RUN" else word for word in arguments]
    assert call("research", "trace", *words) in (1, 2)
    assert reason in capsys.readouterr().err


def test_huge_and_invalid_input(place, capsys, monkeypatch):
    piped(monkeypatch, b"x" * 70_000)
    assert call("research", "trace", "-", place / "run") == 1
    assert "65,536" in error_of(capsys)
    piped(monkeypatch, b"valid \xff")
    assert call("research", "trace", "-", place / "run") == 1
    assert "byte 6" in error_of(capsys)


def test_data_that_is_gone(workdir, capsys):
    copy = reciting.copy_to(workdir / "copy")
    shutil.rmtree(copy / "notes")
    shutil.rmtree(copy / "streams")
    assert call("research", "trace", UNSEEN, copy / "run") == 1
    assert "error: there is no training text to search" in capsys.readouterr().err


def test_a_checkpoint_without_a_run(place, workdir, capsys):
    shutil.copy(place / "run/checkpoints/best.pt", workdir / "model.pt")
    assert call("research", "trace", UNSEEN, workdir / "model.pt") == 1
    assert "model.pt is not in a run folder" in error_of(capsys)


def test_clean_lists_the_index(place, capsys):
    assert call("research", "trace", UNSEEN, place / "run") == 0
    capsys.readouterr()
    assert call("cache", "clean") == 0
    assert "text index: roam" in capsys.readouterr().out
