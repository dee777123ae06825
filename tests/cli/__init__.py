"""Helpers of the command tests."""

import io
import os
import sys
import warnings

from niels_gpt.cli.main import main
from niels_gpt.training import progress
from niels_gpt.training.progress import Silent

SMALL = [
    "--set=model={T: 32, C: 16, L: 1, H: 2, dropout: 0.1}",
    "--set=train.warmup_steps=0",
    "--set=train.B=4",
    "--set=train.base_lr=1e-2",
    "--set=train.p_train={roam: 0.6, primer: 0.4}",
    "--set=train.p_val={roam: 0.5, primer: 0.5}",
    "--set=output.eval_steps=2",
    "--set=output.sample_tokens=5",
]
"""Options of `train` for a model that trains in a moment."""


def call(*arguments: object) -> int:
    """Run the command line as a shell would; return its exit code."""
    with warnings.catch_warnings():  # main replaces warnings.showwarning
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            return end.code or 0
    return 0


def data(folder) -> list[str]:
    """Options for the texts that tests.training.write_texts wrote."""
    return ["--roam", str(folder / "notes"), "--primer", str(folder / "primer.txt")]


def error_of(capsys) -> str:
    """Return the error message, which must be one line on stderr without a traceback."""
    errors = capsys.readouterr().err
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert errors.endswith("\n")
    assert "Traceback" not in errors
    return errors.removeprefix("error: ").rstrip("\n")


def typed(monkeypatch, text):
    """Let stdin be this text."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def piped(monkeypatch, data):
    """Let stdin be these bytes, valid UTF-8 or not."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def snapshot(folder):
    """Return path -> bytes of every file in a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class After(Silent):
    """A reporter that calls a function after a step, before anything of the step is saved."""

    def __init__(self, step, action):
        self.after, self.action = step, action

    def step(self, line):
        if line["step"] + 1 == self.after:
            self.action()


def send(number):
    """Return a function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def report_to(monkeypatch, *reporters):
    """Let the next runs report to these reporters, one each, and all later ones to none."""
    left = iter(reporters)
    monkeypatch.setattr(progress, "reporter", lambda **_: next(left, None) or Silent())
