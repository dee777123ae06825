"""Permutations and random numbers by index. The exact values are part of the format: they fix the order of training."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.splice.permutation import Permutation, draws, mix, uniform


def splitmix64(x):
    """The reference in Python integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_mix_is_splitmix64(numbers):
    before = np.array(numbers, dtype=np.uint64)
    assert mix(before).tolist() == [splitmix64(x) for x in numbers]
    assert before.tolist() == numbers


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 2**62), st.integers(0, 3))
def test_draws_and_uniform(seed, epoch, index, draw):
    bits = draws(seed, np.array([epoch]), np.array([index]))
    expected = splitmix64(splitmix64(epoch ^ seed) ^ splitmix64(index))
    assert bits.tolist() == [expected]
    assert uniform(bits, draw).tolist() == [(splitmix64((expected + draw) % 2**64) >> 11) / 2**53]


@pytest.mark.parametrize(
    ("n", "seed", "expected"),
    [
        (1, 0, [0]),
        (2, 3, [1, 0]),
        (10, 42, [4, 3, 8, 5, 2, 7, 1, 9, 6, 0]),
        (17, 1, [2, 9, 16, 8, 11, 0, 6, 1, 10, 13, 7, 3, 15, 12, 4, 14, 5]),
    ],
)
def test_golden_permutations(n, seed, expected):
    order = Permutation(n, seed)(np.arange(n))
    assert order.dtype == np.int64
    assert order.tolist() == expected


def test_golden_values_of_a_huge_permutation():
    n = 10**12
    assert Permutation(n, 5)(np.array([0, 1, n - 1])).tolist() == [356147118554, 845047477394, 963857200903]


@given(st.integers(1, 400), st.integers(0, 2**63))
def test_every_element_once(n, seed):
    assert sorted(Permutation(n, seed)(np.arange(n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [0, -3])
def test_empty_permutation_raises(n):
    with pytest.raises(ValueError, match=f"n={n}"):
        Permutation(n, 0)
