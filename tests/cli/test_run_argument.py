"""RUN is positional everywhere, the newest by default; commands on a run work from any folder."""

import json
import os
from pathlib import Path

import pytest

from niels_gpt.cli.generate_text import split_words
from niels_gpt.cli.options import complete_runs
from niels_gpt.config.yaml_file import load_config
from niels_gpt.runs.checkpoint import read_checkpoint
from tests.cli import SMALL, call, error_of
from tests.training import write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which `runs/mine` was trained with relative paths."""
    folder = tmp_path_factory.mktemp("place")
    write_texts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
        options = ["--notes", "notes", "--primer", "primer.txt", "--steps", 3, "--set", "output.eval_every=3"]
        assert call("train", *SMALL, *options, "--run-dir", "runs/mine", "--quiet") == 0
    return folder


@pytest.fixture
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def test_training_leaves_only_the_run_in_the_current_folder(place):
    assert sorted(path.name for path in place.iterdir()) == ["notes", "primer.txt", "runs", "xdg"]


def test_paths_are_absolute_in_the_config_and_absent_from_checkpoints(place):
    data = load_config(place / "runs/mine/config.yaml").data
    assert (data.roam, data.primer, data.wiki) == (str(place / "notes"), str(place / "primer.txt"), "embedded")
    checkpoints = place / "runs/mine/checkpoints"
    saved = read_checkpoint(checkpoints / "latest.pt", "cpu")
    assert str(place) not in repr([saved["config"], saved["extra"]])
    for path in checkpoints.iterdir():
        assert str(place).encode() not in path.read_bytes(), path


def test_commands_on_a_run_work_from_any_folder(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run = place / "runs/mine"
    assert call("eval", run, "--limit", 50, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["scores"]) >= {"val_roam", "val_chat"}
    assert call("research", "batch", "show", run, "--step", 1) == 0
    capsys.readouterr()
    assert call("generate", run, "- [[", "--max-tokens", 3, "--threads", 1) == 0
    assert capsys.readouterr().out.startswith("- [[")
    assert call("train", run, "--resume") == 0  # finished: nothing to do
    assert sorted(path.name for path in tmp_path.iterdir()) == ["xdg"]


@pytest.mark.parametrize(
    "command", ["eval --limit 50 --json", "generate - --max-tokens 2", "research batch show --step 0"]
)
def test_the_newest_run_is_used_and_said(inside, capsys, monkeypatch, command):
    words = ["-- text" if word == "-" else word for word in command.split()]
    assert call(*words) == 0
    shown, errors = capsys.readouterr()
    assert shown and errors == f"using {Path('runs/mine')}\n"
    assert call(*words, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_which_word_is_the_run(inside, tmp_path):
    best = "runs/mine/checkpoints/best.pt"
    for words, run, text in (
        (["hello"], None, "hello"),
        (["runs/mine", "hello"], "runs/mine", "hello"),
        ([best, "runs/mine"], best, "runs/mine"),
    ):
        assert split_words(words) == (None if run is None else Path(run), text)
    assert split_words(["runs/mine"], Path(best)) == (None, "runs/mine")


def test_unclear_words_are_explained(inside, capsys):
    for words, facts in (
        (["hello", "world"], ["'hello' is not a run", "niels-gpt generate 'hello world'"]),
        (["runs/mine", "a", "b"], ["niels-gpt generate runs/mine 'a b'"]),
        (["runs/mine"], ["runs/mine is a run", "niels-gpt generate runs/mine TEXT"]),
    ):
        assert call("generate", *words) == 1
        error = error_of(capsys)
        assert all(fact in error for fact in facts), error


def test_a_run_folder_with_a_leading_dash(inside, capsys):
    if not os.path.lexists("-mine"):
        Path("-mine").symlink_to("runs/mine")
    try:
        assert call("generate", "--max-tokens", 2, "--", "-mine", "text") == 0
        assert call("eval", "--limit", 50, "--", "-mine") == 0
        assert call("eval", "-mine") == 2
    finally:
        Path("-mine").unlink()


def test_runs_are_completed(inside):
    assert complete_runs("") == complete_runs("runs/m") == ["runs/mine"]
    assert complete_runs("other") == []


def test_a_typo_is_refused_with_the_nearest_option(inside, capsys):
    assert call("generate", "hello", "--temprature", "3") == 2
    assert "--temperature" in capsys.readouterr().err
