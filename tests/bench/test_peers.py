"""Which environment a peer runs in."""

import sys

import pytest

from bench import peers
from bench.case import NAMES, load_case


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty project in which only .venv-peers-litgpt exists, and no peer is installed here."""
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    (tmp_path / ".venv-peers-litgpt/bin").mkdir(parents=True)
    (tmp_path / ".venv-peers-litgpt/bin/python").touch()
    return tmp_path


def test_a_peer_runs_in_the_environment_that_has_it(root, monkeypatch):
    assert peers.python_of("litgpt") == str(root / ".venv-peers-litgpt/bin/python")
    assert peers.python_of("trl") == peers.python_of("") == sys.executable  # reported as not installed, or needs none
    assert peers.environment_of("litgpt").name == ".venv-peers-litgpt"
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    assert peers.environment_of("litgpt") is None


def test_versions_come_from_the_same_environment(root):
    info = root / ".venv-peers-litgpt/lib/python3.11/site-packages/litgpt-9.8.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: litgpt\nVersion: 9.8\n", encoding="utf-8")
    assert peers.version_of("litgpt") == "9.8"
    (root / ".venv-peers/bin").mkdir(parents=True)
    (root / ".venv-peers/bin/python").touch()
    assert peers.version_of("trl") is None  # the environment exists, but without the package
    assert peers.version_of("torch").startswith("2.")


def test_a_package_can_be_installed_by_another_name(root):
    (root / ".venv-gguf/bin").mkdir(parents=True)
    (root / ".venv-gguf/bin/python").touch()
    info = root / ".venv-gguf/lib/python3.11/site-packages/llama_cpp_python-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 1.2\n", encoding="utf-8")
    assert peers.version_of("llama_cpp") == "1.2"


def test_every_package_of_a_contender_has_an_environment_in_the_makefile():
    makefile = (peers.ROOT / "Makefile").read_text(encoding="utf-8")
    packages = {c.package for name in NAMES for c in load_case(name).contenders if c.package}
    assert packages == set(peers.ENVIRONMENTS)
    for package, folder in peers.ENVIRONMENTS.items():
        assert f":= {folder}\n" in makefile and peers.DISTRIBUTIONS.get(package, package) in makefile
