"""`make setup` with a Python that prints what it is asked: pip shows its progress, and CI keeps its log short."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("target", ["setup", "setup-locked"])
def test_pip_shows_its_progress(tmp_path, target):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "asked: $*"\n', encoding="utf-8")
    python.chmod(0o755)
    command = ["make", "--no-print-directory", target, f"VENV={tmp_path / 'venv'}"]
    shown = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=True).stdout
    asked = [line.split() for line in shown.splitlines() if line.startswith("asked:")]
    assert asked and all(words[1:4] == ["-m", "pip", "install"] for words in asked)
    assert not any({"--quiet", "-q", "--progress-bar=off"} & set(words) for words in asked)
    assert (tmp_path / "venv/.ready").exists()


def test_ci_keeps_its_log_short():
    assert "export PIP_QUIET=1" in (ROOT / ".ci/run").read_text(encoding="utf-8")
