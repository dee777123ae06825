"""JSON of users: as json.loads, but nesting is limited."""

import json

import pytest

from niels_gpt.system.json_text import DEEPEST, NestedTooDeeply, parse_json


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [[1, {"a": [2]}], {"b": {}}]])
def test_values_are_those_of_json(value):
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("depth", [DEEPEST + 1, 900, 100_000])
def test_deep_nesting_is_a_value_error(depth):
    with pytest.raises(NestedTooDeeply, match=f"more than {DEEPEST} levels"):
        parse_json("[" * depth + "]" * depth)
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
