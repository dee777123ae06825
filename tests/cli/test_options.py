"""Shared options: choices, and output paths that are refused before any work."""

import shlex
from pathlib import Path

import pytest

from tests.cli import call, error_of


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate hello --run nowhere --weights int4", "--weights must be float32 or int8, got 'int4'"),
        ("chat --run nowhere --weights int4", "--weights must be float32 or int8, got 'int4'"),
        ("memorize nowhere --select best", "--select must be first, longest, shortest or random, got 'best'"),
        ("memorize nowhere --encoding-errors drop", "--encoding-errors must be strict, replace or skip, got 'drop'"),
        (
            "audit nowhere --notes nowhere --encoding-errors x",
            "--encoding-errors must be strict, replace or skip, got 'x'",
        ),
        ("eval --run nowhere --split train", "--split must be val or test, got 'train'"),
        ("eval --run nowhere --precision fp8", "--precision must be fp32 or bf16, got 'fp8'"),
        ("data lint nowhere --split test", "--split must be train or val, got 'test'"),
    ],
)
def test_an_unknown_choice_is_refused_before_any_work(capsys, command, message):
    assert call(*command.split()) == 1
    assert error_of(capsys) == message


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
