"""What all commands share: -h, --threads and --quiet, old names of options, text that begins with a dash."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Optional

import pytest
import torch
import typer

from niels_gpt.cli.command_line import OLD_NAMES, App
from niels_gpt.cli.run_app import run_app
from niels_gpt.system import console

app = App(help="For the tests.")
seen = {}


@app.callback()
def root() -> None:
    """Several commands."""


@app.command("one")
def one(
    run: Annotated[Optional[Path], typer.Argument(metavar="RUN")] = None,  # noqa: UP045
    notes: Annotated[str, typer.Option("--notes")] = "",
    number: Annotated[int, typer.Option("-n", "--number")] = 1,
    flag: Annotated[bool, typer.Option("--flag/--no-flag")] = True,
) -> None:
    seen.update(run=run, notes=notes, number=number, flag=flag, threads=torch.get_num_threads())
    seen.update(quiet=console.is_quiet())


@app.command("say")
def say(
    words: Annotated[list[str], typer.Argument(metavar="[RUN] TEXT")],
    number: Annotated[int, typer.Option("-n", "--number")] = 1,
    temperature: Annotated[float, typer.Option("--temperature")] = 1.0,
) -> None:
    seen.update(words=words, number=number, temperature=temperature)


@app.command("verify")
def verify(path: Annotated[Path, typer.Argument(metavar="CACHE")] = Path("cache")) -> None:
    seen.update(path=path)


def call(*words):
    seen.clear()
    try:
        run_app(app, list(words), name="prog")
    except SystemExit as end:
        return end.code or 0
    return 0


def result(*words):
    assert call(*words) == 0
    return dict(seen)


def test_old_names_are_accepted_and_hidden(capsys):
    for words in (["--notes", "a"], ["--roam", "a"], ["--roam=a"]):
        assert result("one", *words)["notes"] == "a"
    assert call("one", "--help") == 0
    shown = capsys.readouterr().out
    assert "--notes" in shown and not any(old in shown for old in (*OLD_NAMES, "--run"))
    assert call("say", "x", "--roam", "a") == 2  # no --notes here
    assert "--roam" in capsys.readouterr().err


def test_the_first_positional_argument_has_an_option_name_too(capsys):
    for words in (["x"], ["--run", "x"], ["--run=x"], ["-n", "2", "--run", "x"]):
        assert result("one", *words)["run"] == Path("x")
    assert result("one")["run"] is None
    assert result("say", "--run", "x", "hello")["words"] == ["x", "hello"]
    assert result("say", "hello", "--run", "x")["words"] == ["x", "hello"]
    assert result("verify", "--cache-dir", "c") == result("verify", "--token-cache", "c") == {"path": Path("c")}
    for words in (["y", "--run", "x"], ["--run", "x", "--run", "y"]):
        assert call("one", *words) == 1
        error = capsys.readouterr().err
        assert "--run x" in error and "y" in error


@pytest.mark.parametrize(
    "text",
    ["- [[", "- [ ] milk", "-n apples", "-5 degrees", "--- a: b", "-", "-x", "--dry run", "-> so\n--no", "—"],
)
def test_text_that_begins_with_a_dash(text):
    for words in ([text, "-n", "3"], ["-n", "3", text]):
        assert result("say", *words) == {"words": [text], "number": 3, "temperature": 1.0}
    assert result("say", "--", text)["words"] == [text]


def test_options_stay_options(capsys):
    assert result("say", "-n3", "x")["number"] == 3
    assert result("say", "--temperature", "-1", "x")["temperature"] == -1.0
    assert result("one", "--no-flag", "x") | {"threads": 0, "quiet": 0} == {
        "run": Path("x"),
        "notes": "",
        "number": 1,
        "flag": False,
        "threads": 0,
        "quiet": 0,
    }
    assert result("one", "--", "-run")["run"] == Path("-run")
    for words, known in ((["say", "x", "--temprature", "3"], "--temperature"), (["one", "-x"], "-x")):
        assert call(*words) == 2
        assert known in capsys.readouterr().err


def test_h_is_help(capsys):
    for words in (["-h"], ["one", "-h"], ["say", "-h"]):
        assert call(*words) == 0
        assert "Usage: prog" in capsys.readouterr().out


def test_quiet(capsys):
    assert result("one", "--quiet")["quiet"] is True
    assert result("one")["quiet"] is False
    console.hint("next")
    console.set_quiet(True)
    console.hint("unseen")
    console.set_quiet(False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "next\n")


def test_threads(monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored afterwards
    try:
        assert result("one", "--threads", "2")["threads"] == 2
    finally:
        torch.set_num_threads(before)
    assert call("one", "--threads", "0") == 2


def test_threads_are_set_before_torch_is_loaded():
    code = (
        "import sys; from niels_gpt.cli.command_line import App\nfrom niels_gpt.cli.run_app import run_app\n"
        "app = App(help='x')\n@app.callback()\ndef root() -> None: ...\n"
        "@app.command()\ndef go() -> None:\n assert 'torch' not in sys.modules\n import torch\n"
        " print(torch.get_num_threads())\nrun_app(app, ['go', '--threads', '1'], name='x')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")
    assert done.stdout == "1\n", done.stderr  # not more than one: MKL never uses more threads than there are cores
