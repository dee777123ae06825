"""Checks of integers, probabilities and keys."""

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
def test_integers(value):
    found = check_int("k", value, 1, 3)
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize("value", [True, 2.0, "2", None, np.float32(2), [2], math.nan])
def test_values_that_are_not_integers(value):
    with pytest.raises(ValueError, match=r"^k .*integer.* 1, got "):
        check_int("k", value)


@pytest.mark.parametrize("value", [-1, 4, 10**30])
def test_a_number_outside_the_limits(value):
    with pytest.raises(ValueError, match=rf"^k .*0 to 3, got {value}$"):
        check_int("k", value, 0, 3)


def test_numpy_numbers_become_python_numbers():
    given = (np.int64(3), np.float32(0.5), [np.uint8(1), "a", None], True, 2, 1.5)
    found = to_python_number(given)
    assert found == (3, 0.5, [1, "a", None], True, 2, 1.5)
    assert [type(value) for value in (*found, *found[2])] == [int, float, list, bool, int, float, int, str, type(None)]


@pytest.mark.parametrize(
    "p", [{"a": 1.0}, {"a": 0.3, "b": 0.7 + 9e-7}, {"a": 0, "b": 1}, dict.fromkeys("abcdefghij", 0.1), {"a": 1 - 9e-7}]
)
def test_a_distribution(p):
    check_probabilities(p)


@pytest.mark.parametrize(
    ("p", "facts"),
    [
        ({}, "p_train"),
        ({"a": 0.5}, r"p_train .*1e-6.* a=0.5 .*0.5"),
        ({"a": 0.5, "b": 0.500002}, "p_train .*sum"),
        ({"a": 1 - 2e-6}, "p_train .*sum"),
        ({"a": -0.5, "b": 1.5}, r"p_train\['a'\] .*-0.5"),
        ({"a": math.nan}, r"p_train\['a'\]"),
        ({"a": math.inf}, r"p_train\['a'\]"),
        ({"a": "1"}, r"p_train\['a'\]"),
    ],
)
def test_invalid_distributions(p, facts):
    with pytest.raises(ValueError, match=facts):
        check_probabilities(p, name="p_train")


def test_an_unknown_key():
    message = unknown_key_message("train", "base_lrr", ["B", "base_lr"])
    assert "train.base_lrr;" in message and "base_lr?" in message and "B" not in message
    message = unknown_key_message("", "zzz", ["data", "sft"])
    assert " zzz;" in message and message.endswith("data, sft")
