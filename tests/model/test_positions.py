"""The positions of the tokens of a forward pass, and what is wrong with them."""

import pytest
import torch

from niels_gpt import ModelConfig
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.model.positions import token_positions

T = 8
IDS = torch.zeros(2, 5, dtype=torch.int64)


def cache(*lengths):
    made = KVCache(ModelConfig(V=9, T=T, C=4, L=1, H=1), len(lengths), device=IDS.device, dtype=torch.float32)
    made.lengths = list(lengths)
    return made


def test_they_count_from_zero():
    assert token_positions(IDS, T, None, None, None) == slice(0, 5)
    assert token_positions(IDS, T, None, torch.ones_like(IDS), None) == slice(0, 5)


def test_they_continue_a_cache():
    rows = cache(3, 3)
    assert token_positions(IDS, T, rows, None, None) == slice(3, 8)
    assert rows.lengths == [8, 8]
    ragged = token_positions(IDS[:, :2], T, cache(3, 1), None, None)
    assert ragged.tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64], ids=str)
def test_they_may_be_given_as_integers_of_any_size(dtype):
    given = torch.tensor([[0, 7, 3, 3, 1], [6, 5, 4, 3, 2]])
    found = token_positions(IDS, T, None, None, given.to(dtype))
    assert found.dtype == torch.int64 and torch.equal(found, given)


@pytest.mark.parametrize(("value", "numbers"), [(T, r"0\.\.7 .*T=8.*0\.\.8"), (-1, r"-1\.\.0")])
def test_positions_outside_the_window_raise(value, numbers):
    given = torch.zeros_like(IDS)
    given[1, 4] = value
    with pytest.raises(ValueError, match=numbers):
        token_positions(IDS, T, None, None, given)


def test_an_empty_batch_has_no_positions():
    empty = torch.zeros(0, 5, dtype=torch.int64)
    assert token_positions(empty, T, None, None, empty).shape == (0, 5)


@pytest.mark.parametrize("name", ["segments", "positions"])
@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), r"\(2, 5\).*\(2, 4\)"),
        (torch.zeros(5, dtype=torch.int64), r"\(2, 5\).*\(5,\)"),
        (torch.zeros(1, 5, dtype=torch.int64), r"\(2, 5\).*\(1, 5\)"),
        (torch.zeros(2, 5), "float32"),
        (torch.zeros(2, 5, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, 5, dtype=torch.bool), "bool"),
    ],
)
def test_what_does_not_fit_the_ids_raises(name, wrong, facts):
    options = {"segments": None, "positions": None, name: wrong}
    with pytest.raises(ValueError, match=f"{name}.*integers.*{facts}"):
        token_positions(IDS, T, None, **options)


@pytest.mark.parametrize("name", ["segments", "positions"])
def test_a_cache_excludes_them_and_stays_as_it_was(name):
    rows = cache(0, 0)
    with pytest.raises(ValueError, match=f"{name}.*cache"):
        token_positions(IDS, T, rows, **{"segments": None, "positions": None, name: torch.zeros_like(IDS)})
    assert rows.lengths == [0, 0]
