"""Fixtures for tests of training."""

import pytest

from tests.training import write_texts


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with notes and dialogues, which tests only read."""
    return write_texts(tmp_path_factory.mktemp("texts") / "data")
