"""The commands in README.md and docs/: each exists; console blocks of the README and of the first hour run in order.

`test_how_to.py` runs the how-to pages. Other pages, and blocks marked `sh` or `bash`, need the Hub, files or hours:
only their commands and options are checked.
"""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer.main

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.cli.main import app
from niels_gpt.data import embedded
from niels_gpt.report import curves
from niels_gpt.serve import server
from niels_gpt.workflow import plan
from niels_gpt.workflow.plan import Size
from tests.cli import call
from tests.training import write_texts

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [ROOT / "README.md", ROOT / "docs" / "first-hour.md"]
"""The pages whose console blocks are run."""
SHELLS = ("console", "sh", "bash", "shell")
SMALL = [
    "--set=model={T: 64, C: 16, L: 1, H: 2, dropout: 0.1}",
    "--set=train.warmup_steps=0",
    "--set=train.B=2",
    "--set=output.eval_steps=1",
    "--set=output.sample_tokens=5",
]
EXTRA = {
    "demo": ["--steps", "4"],
    "train": ["--steps", "4", *SMALL],
    "pipeline": [
        f"--set={phase}.train.{value}" for phase in ("pretrain", "sft") for value in ("total_steps=2", "warmup_steps=0")
    ],
    "notes": ["--minutes", "0.2"],
    "memorize": ["--window", "40", "--prompt", "20", "--stride", "200", "--greedy", "8"],
    "audit": ["--window", "40", "--prompt", "20", "--stride", "200"],
}
"""Options added to a command so that it takes a second; the last value of an option wins."""
AUDIT_CODES = (0, 3, 4)
"""Exit codes of `audit`: safe, recites a passage, not judged; all are results."""
TINY = Size(16, 1, 1, 64)
"""The model of `demo` and `notes`."""


def commands(page: Path, languages: tuple[str, ...] = SHELLS) -> list[list[str]]:
    """Return the `niels-gpt` commands of the shell blocks of a page, as words.

    A prompt (`$ `), a path before the program, a line continued by a backslash, comments, pipes and redirections are
    allowed. Synopses such as `niels-gpt train [--resume]` are skipped.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for language, block in re.findall(r"^ *```(\S*)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines() if language in languages else []
        if any(line.startswith("$ ") for line in lines):  # the other lines are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in map(str.strip, lines):
            if re.match(r"(\S*/)?niels-gpt\s", line) and not re.search(r"\[-|\.\.\.|<[a-z]|[A-Z]+=\[", line):
                words = shlex.split(line, comments=True)
                ends = [i for i, word in enumerate(words) if word in ("|", ">", ">>", "&&", ";", "<", "&", "2>&1")]
                found.append(words[1 : min(ends, default=len(words))])
    return found


ROOT_COMMAND = typer.main.get_command(app)
ALL = [(page.name, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_page_has_commands(page):
    assert len(commands(page, ("console",))) >= 3


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {shlex.join(words)}"[:70] for page, words in ALL])
def test_every_command_of_the_docs_exists_with_its_options(page, words):
    """Parsed as typer would, without running it."""
    command, rest = ROOT_COMMAND, list(words)
    while getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
        default = words[0] == "notes" and command.name == "notes" and rest[0] not in command.commands
        name = "folder" if default else rest.pop(0)
        assert name in command.commands, f"{page}: no command {name} in {shlex.join(words)}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if re.match(r"--?[A-Za-z]", word):
            assert word.partition("=")[0] in {*known, "--help"}, f"{page}: {shlex.join(words)} has no option {word}"


@pytest.mark.slow
def test_the_commands_of_the_readme_and_the_first_hour_run_in_order(tmp_path, monkeypatch, capsys):
    """A command of both pages runs once, for the README."""
    home, folder = tmp_path / "home", tmp_path / "folder"
    write_texts(home)  # ~/notes and ~/primer.txt
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(folder)
    files = embedded.stdlib_files()[:60]
    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)
    monkeypatch.setattr(plan, "SIZES", (TINY, TINY))
    monkeypatch.setattr(plan, "SFT_STEPS", 4)
    few = tmp_path / "few.txt"
    few.write_text(embedded.PRIMER.read_text(encoding="utf-8")[:40_000].rpartition(DELIMITER)[0], encoding="utf-8")
    monkeypatch.setattr(embedded, "PRIMER", few)
    monkeypatch.setattr(server, "run", lambda app, *_: served.extend(app.state.models))  # else until Ctrl-C
    served: list[str] = []
    lines = dict.fromkeys(shlex.join(words) for page in RUN for words in commands(page, ("console",)))
    for words in map(shlex.split, lines):
        words = [str(Path(word).expanduser()) if word.startswith("~/") else word for word in words]
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
        extra = [] if words[:2] == ["notes", "check"] or "--resume" in words else EXTRA.get(words[0], [])
        code = call(*words, *extra)
        output, errors = capsys.readouterr()
        assert code in (AUDIT_CODES if words[0] == "audit" else (0,)), f"{shlex.join(words)}\n{output}\n{errors}"
    assert served == ["demo-sft", "demo-pretrain"]
