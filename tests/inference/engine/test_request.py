"""Requests and the checks on what they are made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from niels_gpt.config import MOST_TOKENS
from niels_gpt.inference.engine.request import Request, check_new_tokens, check_prompt
from niels_gpt.inference.sampling import Sampling


def test_continuation_is_what_follows_the_prompt():
    request = Request([5, 6, 7, 8, 9], 3, 4, Sampling(), frozenset(), torch.zeros(4))
    assert (request.tokens, request.received) == ([8, 9], 2)
    assert (request.finished, request.read, request.launched) == (None, 0, 0)


@pytest.mark.parametrize("prompt", [[0, 29], (3,), np.array([0, 29], dtype=np.uint16), iter([1, 2])])
def test_valid_ids_become_ints(prompt):
    ids = check_prompt(prompt, 30)
    assert {type(i) for i in ids} == {int}
    assert 0 < len(ids) <= 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 7.*empty"),
        ([0, 30], r"prompt 7.*0.*29.*30"),
        ([-1], r"prompt 7.*-1"),
        ([5.0], r"prompt 7.*5\.0"),
        ([1, math.nan], "nan"),
        ([True], "True"),
        ("ab", "'a'"),
    ],
)
def test_invalid_ids(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(prompt, 30, "prompt 7")


def test_number_of_new_tokens():
    assert [check_new_tokens(n, 0) for n in (0, 1, MOST_TOKENS)] == [0, 1, MOST_TOKENS]
    assert type(check_new_tokens(np.int64(5), 1)) is int
    for number, low in ((0, 1), (-1, 0), (MOST_TOKENS + 1, 0), (2.0, 0), (True, 0)):
        with pytest.raises(ValueError, match=rf"max_new_tokens.*{low}.*{MOST_TOKENS}.*{number}"):
            check_new_tokens(number, low)
