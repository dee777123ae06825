"""The commands that messages show work as printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from niels_gpt.system import program as module
from tests.conftest import real_program


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that writes a script `niels-gpt` and says how it was started; the PATH has only `bin`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "program", real_program)

    def script(path, started=None):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho started\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "argv", [str(started or path)])
        return path

    return script


def runs(command):
    return subprocess.run(command, shell=True, capture_output=True, encoding="utf-8").stdout == "started\n"


def test_on_the_path(install):
    install("bin/niels-gpt")
    assert module.command("chat", "runs/a b") == "niels-gpt chat 'runs/a b'"
    assert runs(module.command("chat"))


def test_a_link_on_the_path_as_pipx_makes(install, tmp_path):
    script = install("venv/bin/niels-gpt")
    (tmp_path / "bin" / "niels-gpt").symlink_to(script)
    assert module.program() == "niels-gpt"


def test_another_installation_on_the_path(install):
    install("bin/niels-gpt")
    install(".venv/bin/niels-gpt")
    assert module.program() == ".venv/bin/niels-gpt"


@pytest.mark.parametrize("started", [".venv/bin/niels-gpt", None])
def test_the_path_of_the_script(install, tmp_path, monkeypatch, started):
    path = install(".venv/bin/niels-gpt", started)
    assert module.program() == ".venv/bin/niels-gpt"
    assert runs(module.command("demo"))
    monkeypatch.setattr(sys, "argv", [str(path)])
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    assert module.program() == str(path)
    assert runs(module.command("demo"))
    monkeypatch.chdir(path.parent)
    assert module.program() == "./niels-gpt"
    assert runs(module.command("demo"))


def test_a_path_with_a_space_is_quoted(install):
    install("my env/bin/niels-gpt")
    assert module.program() == "'my env/bin/niels-gpt'"
    assert runs(module.command("demo"))


def test_as_a_module(install, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/niels_gpt/__main__.py"])
    assert module.program() == f"{Path(sys.executable).absolute()} -m niels_gpt"
    (tmp_path / "bin" / "python3").symlink_to("/bin/sh")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    assert module.program() == "python3 -m niels_gpt"
    monkeypatch.setenv("PATH", "/nowhere")
    assert module.program() == "bin/python3 -m niels_gpt"
