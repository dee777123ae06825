"""`niels-gpt research batch show`: source, document, offset and text of every row of a step."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from niels_gpt.config.yaml_file import load_config
from niels_gpt.report import curves
from niels_gpt.training.tasks.registry import open_task
from tests.cli import SMALL, call, data, error_of
from tests.training import write_texts


@pytest.fixture(autouse=True)
def no_plot(monkeypatch):
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts, one of them with a name like terminal markup, and a trained run."""
    folder = tmp_path_factory.mktemp("batch")
    texts = write_texts(folder / "texts")
    markup = "# [[draft]] :smile:\n\nsee [[other note]] and [bold]this[/bold] :warning: it's \\here [/]\n" * 30
    (texts / "notes" / "a [draft] note.md").write_text(markup, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(curves, "plot_losses", lambda run: None)
        assert call("train", *SMALL, *data(texts), "--steps", 3, "--run-dir", "run", "--set", "model.T=150") == 0
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_json(inside, capsys):
    assert call("research", "batch", "show", "--run", "run", "--step", 100, "--json") == 0
    rows = [dataclasses.asdict(row) for row in open_task(load_config("run/config.yaml")).origins(100)]
    assert capsys.readouterr().out == json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def test_every_row_is_printed_as_it_is(inside, capsys):
    """Also names and texts that look like terminal markup or emoji, and texts longer than a terminal is wide."""
    seen_markup = False
    for step in range(7):
        assert call("research", "batch", "show", "--run", "run", "--step", step) == 0
        output = capsys.readouterr().out
        end = " (past the end of the run)" if step >= 3 else ""
        assert output.startswith(f"step {step} of 3{end}: 4 rows of 150 bytes\n")
        blocks = output.split("\n\n")[1:]
        rows = open_task(load_config("run/config.yaml")).origins(step)
        for block, row in zip(blocks, rows, strict=True):
            head, _, text = block.partition("\n")
            document = row.document.removeprefix(f"{Path.cwd()}/")
            assert head == (
                f"row {row.row}  {row.source}  {document}  offset {row.offset}  (stream {row.stream_offset})"
            )
            assert text.rstrip("\n") == repr(row.text)[1:-1]
            seen_markup |= "[draft]" in row.document
    assert seen_markup


def test_long_texts_are_cut(inside, capsys):
    rows = open_task(load_config("run/config.yaml")).origins(1)
    longest = max(len(row.text) for row in rows)
    for chars, cut in ((5, True), (longest - 1, True), (longest, False), (0, False)):
        assert call("research", "batch", "show", "--run", "run", "--step", 1, "--chars", chars) == 0
        output = capsys.readouterr().out
        for row in rows:
            assert (
                repr(row.text[: chars or None])[1:-1] + ("..." if chars and len(row.text) > chars else "\n") in output
            )
        assert ("...\n" in output) == cut


def test_a_file_name_in_another_encoding_and_changed_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    for path in (texts / "notes").iterdir():
        path.rename(path.parent / os.fsdecode(b"caf\xe9 " + os.fsencode(path.name)))
    assert call("train", *SMALL, *data(texts), "--steps", 1, "--run-dir", "out") == 0
    for options in ([], ["--json"]):
        capsys.readouterr()
        sys.stdout.reconfigure(errors="strict")  # as a terminal
        assert call("research", "batch", "show", "--run", "out", "--step", 0, *options) == 0
        output = capsys.readouterr().out
        assert r"caf\udce9 note_" in output
    documents = [row.document for row in open_task(load_config("out/config.yaml")).origins(0)]
    assert [row["document"] for row in json.loads(output)] == documents
    primer = texts / "primer.txt"
    primer.write_text(primer.read_text(encoding="utf-8").replace("the", "THE"), encoding="utf-8")
    assert call("research", "batch", "show", "--run", "out", "--step", 0) == 1
    message = error_of(capsys)
    assert "primer" in message and "roam" not in message


def test_rows_of_tokens(token_runs, capsys, monkeypatch):
    monkeypatch.chdir(token_runs)
    assert call("research", "batch", "show", "--run", "runs/chat", "--step", 1, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["text"].startswith(("<usr> ", "<sys> ")) for row in rows)
    assert call("research", "batch", "show", "--run", "runs/chat", "--step", 1) == 0
    output = capsys.readouterr().out
    assert output.startswith("step 1 of 4: 6 rows of 16 tokens\n")
    for row in rows:
        head = f"row {row['row']}  {row['source']}  {row['document']}  offset 0  (stream {row['stream_offset']})"
        assert f"\n{head}\n{repr(row['text'])[1:-1]}\n" in output
