"""Shared options: choices, and output paths that are refused before any work."""

import shlex
from pathlib import Path

import pytest

from niels_gpt.cli.options import check_choice
from tests.cli import call, error_of


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_choices():
    check_choice("--weights", "int8", ("float32", "int8"))
    with pytest.raises(ValueError, match=r"^--weights must be float32 or int8, got 'int4'$"):
        check_choice("--weights", "int4", ("float32", "int8"))
    with pytest.raises(ValueError, match=r"--x must be a, b or c, got 'd'"):
        check_choice("--x", "d", ("a", "b", "c"))


@pytest.mark.parametrize(
    "command",
    [
        "memorize nowhere --out taken",
        "audit nowhere --notes nowhere --out taken",
        "tokenizer train nowhere --out taken/deeper",
        "splice study --config nowhere --out taken",
        "splice fit nowhere --html taken/page.html",
        "splice coverage --config nowhere --png .",
        "data stats nowhere --png .",
    ],
)
def test_an_unusable_output_path_is_refused_before_any_work(capsys, command):
    """Even before anything is read: none of the inputs exists."""
    Path("taken").write_text("something", encoding="utf-8")
    assert call(*command.split()) == 1
    message = error_of(capsys)
    assert "taken is a file" in message or ". is a folder" in message
    assert f"{command.split()[-2]} " in f"{message} "


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("generate hello --seed 9223372036854775808", "9223372036854775807"),
        ("generate hello --seed -1", "0"),
        ("generate hello --max-tokens 1000001", "1000000"),
        ("chat --max-tokens 0", "1"),
        ("memorize --window 1", "2"),
        ("memorize --prompt 0", "1"),
        ("memorize --stride 0", "1"),
        ("memorize --greedy -1", "0"),
        ("memorize --documents 0", "1"),
        ("data lint --context 0", "1"),
        ("eval --limit 1", "2"),
        ("splice coverage --steps 0", "1"),
        ("splice coverage --epochs 0", "1"),
    ],
)
def test_values_past_a_limit_are_wrong_usage(capsys, command, limit):
    words = shlex.split(command)
    assert call(*words) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert words[-2] in errors and limit in errors
