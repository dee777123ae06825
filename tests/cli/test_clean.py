"""`niels-gpt cache clean`: shows the cache folder, and frees it only when asked to."""

import json
import sys

import pytest

from niels_gpt.system.user_cache import private_folder
from tests.cli import call


@pytest.fixture(autouse=True)
def kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = private_folder() / "attention-0123.so"
    path.write_bytes(b"x" * 1500)
    return path


def test_it_shows_and_removes_nothing_unasked(kernel, capsys):
    assert call("cache", "clean") == 0
    output = capsys.readouterr().out
    assert "xdg/niels-gpt: 1.5kB" in output and "compiled kernel" in output and "--yes" in output
    assert call("cache", "clean", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 1500 and found["entries"][0]["path"] == str(kernel)
    assert kernel.exists()


@pytest.mark.parametrize("options", [["--yes"], ["-y", "--json"]])
def test_yes_frees_it(kernel, capsys, options):
    assert call("cache", "clean", *options) == 0
    output = capsys.readouterr().out
    assert json.loads(output)["freed_bytes"] == 1500 if "--json" in options else "freed 1.5kB" in output
    assert not kernel.exists()
    assert call("cache", "clean", "--yes") == 0
    assert "empty" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "kept"), [("y\n", False), ("n\n", True)])
def test_it_asks_on_a_terminal(kernel, monkeypatch, answer, kept):
    class Terminal:
        lines = iter([answer])

        def isatty(self):
            return True

        def readline(self):
            return next(self.lines)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda *_: answer.strip())
    call("cache", "clean")
    assert kernel.exists() == kept
