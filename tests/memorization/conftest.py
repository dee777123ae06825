"""A run that has memorized two notes, loaded once."""

import pytest

from niels_gpt.runs.loading import load_run
from tests.cli import reciting


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory, with one thread."""
    monkeypatch.chdir(tmp_path)
    with reciting.one_thread():
        yield tmp_path


@pytest.fixture(scope="session")
def place():
    """A folder with `notes/` and `run/`, which recites two of them."""
    return reciting.folder()


@pytest.fixture(scope="session")
def loaded(place):
    """The best checkpoint of the run."""
    return load_run(place / "run", None, "cpu")


@pytest.fixture(scope="session")
def trained(place):
    """Names of the notes that the run was trained on."""
    return reciting.longest(reciting.split(place / "notes")[0], 2)
