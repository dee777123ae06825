from unittest import mock

import pytest

from niels_gpt.cache.writing import input_batches


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Allow connections: the nodes of a Ray cluster have the address of this machine in its network."""


@pytest.fixture(autouse=True)
def small_batches():
    with mock.patch.object(input_batches, "BATCH_ITEMS", 5):
        yield
