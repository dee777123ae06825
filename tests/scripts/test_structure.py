"""Sizes and shape of the package, on a package made for it."""

import json
from pathlib import Path

import pytest

from scripts import structure

FILES = {
    "__init__.py": "",
    "cli/__init__.py": "",
    "cli/main.py": "import sys\nimport typer\nsys.exit(0)\n",
    "low/__init__.py": "",
    "low/a.py": '"""A docstring\n\nof several lines."""\n\n# a comment\nX = (\n    1,\n)\n\n\n'
    'def f():\n    """Text."""\n'
    "    from niels_gpt.low import b\n    raise ValueError\n",
    "low/b.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from niels_gpt.low.c import X\n",
    "low/c.py": "from niels_gpt.low.a import X\nfrom niels_gpt.cli.main import typer\n",
    "low/d.py": f"from typer import Typer\nimport sys\ndef g({', '.join(f'p{i}' for i in range(13))}):\n"
    "    sys.exit(1)\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "niels_gpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_what_is_counted(root: Path) -> None:
    found = structure.measure(root)
    assert found["files"] == 8 and found["raise statements"] == 1
    assert found["lines of low"] == 6 + 3 + 2 + 4 and found["lines of cli"] == 3 and found["lines"] == 18
    assert found["circles of files"] == 1
    assert (found["typer below cli"], found["sys.exit below cli"], found["functions of many parameters"]) == (1, 1, 1)


def test_circles() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert structure.circles(arrows) == [["a", "b", "c"], ["d", "e"]]
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_a_repeated_block_counts_once_for_each_repetition() -> None:
    lines = [f"x = {i}" for i in range(structure.BLOCK)]
    assert structure.repeated_blocks([lines, [*lines, "y = 1"], ["z = 2", *lines]]) == 2
    assert structure.repeated_blocks([lines[1:], lines]) == 0
    assert structure.repeated_blocks([["import a"] * 9]) == 0


def test_a_number_above_its_budget_fails_and_is_never_raised(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "ROOT", root)
    monkeypatch.setattr(structure, "BUDGET", tmp_path / "budget.json")
    structure.BUDGET.write_text(json.dumps({**structure.measure(root), "lines": 17, "files": 99}), encoding="utf-8")
    assert structure.main([]) == 1
    assert "lines: 18, the budget is 17" in capsys.readouterr().out
    assert structure.main(["--lower"]) == 0
    budget = json.loads(structure.BUDGET.read_text(encoding="utf-8"))
    assert (budget["lines"], budget["files"]) == (17, 8)
