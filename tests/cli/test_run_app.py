"""Running a command line: errors as one line, and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from niels_gpt.cli.run_app import run_app
from niels_gpt.system.console import OtherProcessFailed


def run(app, arguments=()):
    run_app(app, list(arguments), name="niels-gpt")


@pytest.mark.parametrize("error", [ValueError("bad value 3"), ArithmeticError("bad value 3"), OSError("bad value 3")])
def test_an_error_is_one_line_and_exit_code_1(error, capsys, monkeypatch):
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)

    def app(**_):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(app)
    assert stopped.value.code == 1
    assert capsys.readouterr() == ("", "error: bad value 3\n")
    monkeypatch.setenv("NIELS_GPT_DEBUG", "1")
    with pytest.raises(type(error)):
        run(app)


@pytest.mark.parametrize(
    ("error", "text"),
    [(MemoryError(), "error: out of memory"), (RecursionError("maximum"), "error: something that was read is nested")],
)
def test_errors_of_memory_and_nesting_are_messages_too(error, text, capsys, monkeypatch):
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)

    def app(**_):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(app)
    printed = capsys.readouterr().err
    assert stopped.value.code == 1 and printed.startswith(text) and printed.count("\n") == 1


def test_a_runtime_error_is_a_bug():
    def app(**_):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(app)


def test_an_error_that_quotes_a_strange_name_is_one_line(capsys, monkeypatch):
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)

    def app(**_):
        raise ValueError("no file a\nerror: b\x1b[2J")

    with pytest.raises(SystemExit):
        run(app)
    assert capsys.readouterr().err == "error: no file a\\nerror: b\\x1b[2J\n"


def test_a_failure_of_another_process_is_not_printed(capsys):
    def app(**_):
        raise OtherProcessFailed("rank 1 failed")

    with pytest.raises(SystemExit) as stopped:
        run(app)
    assert stopped.value.code == 1
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback():
    def app(**_):
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(app)


@pytest.mark.parametrize(("owner", "exits_at_once"), [("error", True), ("cause", True), ("neither", False)])
def test_leave_at_once_skips_the_clean_up(owner, exits_at_once, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "_exit", calls.append)
    error, cause = ValueError("x"), ValueError("y")
    if owner != "neither":
        {"error": error, "cause": cause}[owner].leave_at_once = True

    def app(**_):
        raise error from cause

    with pytest.raises(SystemExit):
        run(app)
    assert calls == ([1] if exits_at_once else [])


def test_arguments(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    seen = {}
    run(lambda **options: seen.update(options), ["--dir=~/x", "~/y", "--z=~", "a=~/b", "--", "--empty="])
    assert seen == {
        "args": ["--dir=/home/someone/x", "~/y", "--z=~", "a=~/b", "--", "--empty="],
        "prog_name": "niels-gpt",
    }
    monkeypatch.setattr(sys, "argv", ["niels-gpt", "--from-argv"])
    run_app(lambda **options: seen.update(options), None, name="niels-gpt")
    assert seen["args"] == ["--from-argv"]


@pytest.mark.parametrize("words", [["--roam="], ["--roam", ""], ["x", "--roam", "", "y"]])
def test_an_empty_value_is_an_error_with_the_option(words, capsys):
    with pytest.raises(SystemExit):
        run(lambda **_: pytest.fail("the command ran"), words)
    assert "--roam" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["", "x"], ["--flag"], ["--flag", "x", ""], ["a="]])
def test_other_empty_arguments_reach_the_command(words):
    seen = {}
    run(lambda **options: seen.update(options), words)
    assert seen["args"] == words


def test_warnings_are_one_line(capsys, monkeypatch):
    import warnings

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def app(**_):
        warnings.showwarning("look here", UserWarning, "f.py", 3)

    run(app)
    assert capsys.readouterr().err == "warning: look here\n"


def test_environment_defaults_do_not_override_the_user(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    run(lambda **_: None)
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["MIMALLOC_PURGE_DELAY"]) == ("7", "-1")
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY")


def test_output_that_fits_the_buffer_but_not_the_disk_is_an_error():
    """The buffer of stdout is written after the command has ended."""
    code = "from niels_gpt.cli.run_app import run_app\nimport sys\n"
    code += "def app(**_):\n    print('short')\n    sys.exit(0)\n"
    code += "run_app(app, [], name='x')"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, encoding="utf-8", env=env
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == ["error: cannot write the output: No space left on device"]


@pytest.mark.parametrize("flush", [False, True])
def test_output_to_a_closed_stdout_is_an_error(flush):
    code = "from niels_gpt.cli.run_app import run_app\nimport sys\n"
    code += f"def app(**_):\n    print('short', flush={flush})\n    sys.exit(0)\n"
    code += "run_app(app, [], name='x')"
    command = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code]
    ended = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8")
    assert (ended.returncode, ended.stderr.count("\n"), "stdout is closed" in ended.stderr) == (1, 1, True)
