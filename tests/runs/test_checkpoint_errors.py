"""The entries that every checkpoint must have, with their types."""

import pytest

from niels_gpt.runs.checkpoint_errors import invalid_entry

VALID = {"step": 0, "config": {}, "extra": {}, "optimizer": None}


@pytest.mark.parametrize("change", [{}, {"step": 5}, {"optimizer": {}}, {"extra": {"data": {"roam": "x"}}}])
def test_valid_entries(change):
    assert invalid_entry(VALID | change) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": 1.0}, "step"),
        ({"config": []}, "config"),
        ({"extra": None}, "extra"),
        ({"optimizer": []}, "optimizer"),
        ({"extra": {"data": []}}, "extra.data"),
    ],
)
def test_the_invalid_entry_is_named(change, named):
    assert invalid_entry(VALID | change).startswith(named)
