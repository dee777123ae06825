"""Shared options: choices, and output paths that are refused before any work."""

import inspect
import re
import shlex
import typing
from importlib import import_module
from pathlib import Path

import pytest
import typer

from niels_gpt.cli import main, research
from niels_gpt.cli.command_line import App
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
            "audit nowhere --encoding-errors x",
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


# --- limits ------------------------------------------------------------------------------------------


def integer_options(sections, path=()):
    """(command, name of the option, its declaration) of every option that takes an integer."""
    for name, entry in ((name, entry) for section in sections.values() for name, entry in section.items()):
        module, _, attribute = entry.place.partition(":")
        found = getattr(import_module(f"niels_gpt.cli.{module}"), attribute)
        if found is research.app:
            yield from integer_options(research.SECTIONS, (name,))
            continue
        if not isinstance(found, typer.Typer):
            function, found = found, App(help="")
            found.command("")(function)
        for command in found.registered_commands:
            words = " ".join((*path, name, command.name or "")).strip()
            for parameter in inspect.signature(command.callback).parameters.values():
                kind, *declared = typing.get_args(parameter.annotation) or [parameter.annotation]
                if int in (kind, *typing.get_args(kind)):
                    option = f"--{parameter.name.replace('_', '-')}"
                    yield words, (*(declared[0].param_decls or ()), option)[-1] if declared else option, declared


def test_every_count_of_every_command_has_an_upper_limit():
    found = list(integer_options(main.SECTIONS))
    assert len(found) > 60 and ("research splice coverage", "--steps") in [
        (command, name) for command, name, _ in found
    ]
    for command, name, declared in found:
        assert declared and declared[0].max is not None, f"{command} {name}"
        assert declared[0].max <= (2**63 - 1 if name == "--seed" else 10**12), f"{command} {name}"


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["splice", "coverage", "--steps", "2147483648"], "1000000"),
        (["train", "--steps", "2147483648"], "1000000000"),
        (["generate", "-n", "2147483648", "a"], "100000"),
        (["cache", "build-all", "--fineweb-train-tokens", "99999999999999999999"], "1000000000000"),
        (["doctor", "--threads", "2147483648"], "4096"),
        (["data", "show", "wiki", "--seed", str(2**63)], str(2**63 - 1)),
    ],
)
def test_a_number_over_the_limit_is_refused_with_the_limit(arguments, limit, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    assert re.search(rf"\b{limit}\b", capsys.readouterr().err)
