"""What values must be."""

import math

import numpy as np
import pytest

from niels_gpt.config.checks import (
    check_int,
    check_probabilities,
    to_python_number,
    unknown_key_message,
)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number(value):
    found = check_int("k", value, 1, 3)
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize("value", [True, 2.0, "2", None, np.float32(2), [2], math.nan])
def test_no_whole_number(value):
    with pytest.raises(ValueError, match=r"^k must be an integer of at least 1, got "):
        check_int("k", value)


@pytest.mark.parametrize("value", [-1, 4, 10**30])
def test_a_number_outside_the_limits(value):
    with pytest.raises(ValueError, match=rf"^k must be an integer from 0 to 3, got {value}$"):
        check_int("k", value, 0, 3)


def test_plain_numbers():
    given = (np.int64(3), np.float32(0.5), [np.uint8(1), "a", None], True, 2, 1.5)
    found = to_python_number(given)
    assert found == (3, 0.5, [1, "a", None], True, 2, 1.5)
    assert [type(value) for value in (*found, *found[2])] == [int, float, list, bool, int, float, int, str, type(None)]


@pytest.mark.parametrize("p", [{"a": 1.0}, {"a": 0.3, "b": 0.7}, {"a": 0, "b": 1}, dict.fromkeys("abcdefghij", 0.1)])
def test_a_distribution(p):
    check_probabilities(p)


@pytest.mark.parametrize(
    ("p", "said"),
    [
        ({}, "p_train is empty"),
        ({"a": 0.5}, r"p_train must sum to 1 \(within 1e-6\), but a=0.5 sum to 0.5"),
        ({"a": 0.5, "b": 0.500002}, "must sum to 1"),
        ({"a": -0.5, "b": 1.5}, r"p_train\['a'\] must be a finite number of at least 0, got -0.5"),
        ({"a": math.nan}, r"p_train\['a'\]"),
        ({"a": math.inf}, r"p_train\['a'\]"),
        ({"a": "1"}, r"p_train\['a'\]"),
    ],
)
def test_no_distribution(p, said):
    with pytest.raises(ValueError, match=said):
        check_probabilities(p, name="p_train")


def test_an_unknown_key():
    assert (
        unknown_key_message("train", "base_lrr", ["B", "base_lr"])
        == "unknown key train.base_lrr; did you mean base_lr?"
    )
    assert unknown_key_message("", "zzz", ["data", "sft"]) == "unknown key zzz; known keys: data, sft"
