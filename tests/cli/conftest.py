"""A run that recites, for the tests of what looks into runs; modules with a `place` of their own have that."""

import pytest

from tests.cli import reciting


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, and one thread: these models are small."""
    monkeypatch.chdir(tmp_path)
    with reciting.one_thread():
        yield


@pytest.fixture(scope="module")
def place():
    """`notes/`, and `run/`, which recites two of them."""
    return reciting.folder()


@pytest.fixture(scope="module")
def trained(place):
    """The names of the notes that the run was trained on."""
    return reciting.longest(reciting.split(place / "notes")[0], 2)
