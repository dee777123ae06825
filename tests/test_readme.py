"""The commands of the README, in order, in a temporary folder, with small settings."""

import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli import call
from tests.training import write_texts

ROOT = Path(__file__).parents[1]
SMALL = [
    "--set=model={T: 64, C: 16, L: 1, H: 2, dropout: 0.1}",
    "--set=train.warmup_steps=0",
    "--set=train.B=2",
    "--set=output.eval_steps=1",
    "--set=output.sample_tokens=5",
]

pytestmark = pytest.mark.slow


def readme_commands() -> list[list[str]]:
    """The `$ niels-gpt` lines of the console blocks, as words; a line may go on after a backslash."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ niels-gpt")]


def shortened(words: list[str]) -> list[str]:
    """The arguments, with few steps and a small model where something is trained."""
    _, command, *options = words
    ends = [i for i, word in enumerate(options) if word in ("|", ">", "&&", ";", "<", "&")]
    options = [os.path.expanduser(word) for word in options[: min(ends, default=len(options))]]  # noqa: PTH111
    if command in ("demo", "train"):
        while "--steps" in options:
            i = options.index("--steps")
            del options[i : i + 2]
        options = [word for word in options if not word.startswith("--steps=")] + ["--steps", "4"]
    if command in ("memorize", "audit"):  # the small model has T=64
        options += ["--window", "40", "--prompt", "20", "--stride", "200"]
    options += ["--greedy", "8"] if command == "memorize" else []
    return [command, *options, *(SMALL if command == "train" else [])]


def test_the_readme_has_commands():
    assert len(readme_commands()) >= 5


def test_the_commands_of_the_readme_work(tmp_path, monkeypatch, capsys):
    home, place = tmp_path / "home", tmp_path / "place"
    write_texts(home)  # ~/notes and ~/primer.txt
    place.mkdir()
    shutil.copytree(ROOT / "configs", place / "configs")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(place)
    for words in readme_commands():
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
        code = call(*shortened(words))
        output, errors = capsys.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{output}\n{errors}"
