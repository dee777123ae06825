"""Sampling against filters for one row in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from niels_gpt.inference.sampling import Sampling, choose, probabilities

ALL = Sampling(temperature=1.0, top_k=None)


def softmax(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def by_rank(p: list[float]) -> list[int]:
    return sorted(range(len(p)), key=lambda i: (-p[i], i))


def keep_top_k(p: list[float], k: int) -> set[int]:
    return set(by_rank(p)[:k])


def keep_top_p(p: list[float], top_p: float) -> set[int]:
    """Return the smallest set of most likely tokens with a total of at least top_p."""
    kept: list[int] = []
    for i in by_rank(p):
        kept.append(i)
        if math.fsum(p[j] for j in kept) >= top_p:
            break
    return set(kept)


def keep_min_p(p: list[float], min_p: float) -> set[int]:
    return {i for i, x in enumerate(p) if x >= min_p * max(p)}


def normal(weights: torch.Tensor) -> list[float]:
    """Return one row, normalized."""
    return (weights / weights.sum()).tolist()


def check(logits: list[float], sampling: Sampling, kept: set[int]) -> None:
    """The distribution is the softmax, restricted to the kept tokens."""
    p = softmax(logits, sampling.temperature)
    total = math.fsum(p[i] for i in kept)
    got = normal(probabilities(torch.tensor([logits], dtype=torch.float64), sampling)[0])
    for i, x in enumerate(got):
        assert x == pytest.approx(p[i] / total if i in kept else 0.0, abs=1e-9), i


rows = st.lists(st.integers(-60, 60), min_size=1, max_size=24, unique=True).map(lambda xs: [x / 10 for x in xs])
temperatures = st.sampled_from([0.3, 0.7, 1.0, 1.7])


# --- the filters -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(logits=rows, temperature=temperatures)
def test_temperature(logits: list[float], temperature: float) -> None:
    check(logits, Sampling(temperature, None), set(range(len(logits))))


@settings(max_examples=40)
@given(logits=rows, temperature=temperatures, k=st.integers(1, 30))
def test_top_k(logits: list[float], temperature: float, k: int) -> None:
    check(logits, Sampling(temperature, k), keep_top_k(logits, k))


@settings(max_examples=40)
@given(logits=rows, temperature=temperatures, top_p=st.floats(0.01, 1.0))
def test_top_p(logits: list[float], temperature: float, top_p: float) -> None:
    p = softmax(logits, temperature)
    ordered = [p[i] for i in by_rank(p)]
    sums = [math.fsum(ordered[:n]) for n in range(1, len(p))]
    assume(all(abs(s - top_p) > 1e-9 for s in sums))  # at a tie the last bit decides
    check(logits, Sampling(temperature, None, top_p), keep_top_p(p, top_p))


@settings(max_examples=40)
@given(logits=rows, temperature=temperatures, min_p=st.floats(0.0, 1.0))
def test_min_p(logits: list[float], temperature: float, min_p: float) -> None:
    p = softmax(logits, temperature)
    assume(all(abs(x - min_p * max(p)) > 1e-9 * max(p) for x in p if x < max(p)))
    check(logits, Sampling(temperature, None, None, min_p), keep_min_p(p, min_p))


@settings(max_examples=40)
@given(logits=rows, k=st.integers(1, 30), min_p=st.floats(0.001, 1.0))
def test_a_token_stays_if_every_filter_keeps_it(logits: list[float], k: int, min_p: float) -> None:
    p = softmax(logits, 0.8)
    assume(all(abs(x - min_p * max(p)) > 1e-9 * max(p) for x in p if x < max(p)))
    check(logits, Sampling(0.8, k, None, min_p), keep_top_k(p, k) & keep_min_p(p, min_p))


def test_filters_are_independent() -> None:
    """top_p 0.6 of (0.5, 0.3, 0.2) needs two tokens, also if top_k removes the third."""
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    check(logits, Sampling(1.0, None, 0.6), {0, 1})
    check(logits, Sampling(1.0, 2, 0.6), {0, 1})
    check(logits, Sampling(1.0, None, 0.6, 0.5), {0, 1})


def test_filters_by_hand() -> None:
    logits = [math.log(x) for x in (0.1, 0.4, 0.2, 0.3)]
    check(logits, Sampling(1.0, 1), {1})
    check(logits, Sampling(1.0, 2), {1, 3})
    check(logits, Sampling(1.0, 99), {0, 1, 2, 3})
    check(logits, Sampling(1.0, None, 0.35), {1})
    check(logits, Sampling(1.0, None, 0.45), {1, 3})
    check(logits, Sampling(1.0, None, 1.0), {0, 1, 2, 3})
    check(logits, Sampling(1.0, None, 1e-9), {1})  # the most likely token always stays
    check(logits, Sampling(1.0, None, None, 0.6), {1, 3})
    check(logits, Sampling(1.0, None, None, 1.0), {1})
    check(logits, Sampling(1.0, None, None, 0.0), {0, 1, 2, 3})


def test_temperature_is_applied_before_the_filters() -> None:
    """At temperature 0.5 (0.4, 0.3, 0.2, 0.1) becomes (16, 9, 4, 1) / 30: top_p 0.5 then needs one token."""
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    check(logits, Sampling(1.0, None, 0.5), {0, 1})
    check(logits, Sampling(0.5, None, 0.5), {0})
    check(logits, Sampling(0.5, None, None, 0.5), {0, 1})
    check(logits, Sampling(0.5, None, None, 0.6), {0})


def test_equal_logits() -> None:
    """With ties at rank k at least k tokens stay, and they are equally likely."""
    got = normal(probabilities(torch.zeros(1, 8), Sampling(1.0, 3))[0])
    kept = [x for x in got if x > 0]
    assert len(kept) >= 3 and max(kept) == pytest.approx(min(kept))


def test_rows_are_filtered_separately() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 40, generator=generator)
    for sampling in (ALL, Sampling(0.7, 5), Sampling(0.7, None, 0.8), Sampling(1.3, None, None, 0.1)):
        together = probabilities(logits, sampling)
        assert together.shape == (6, 40) and together.dtype == torch.float64
        for row in range(6):
            torch.testing.assert_close(together[row], probabilities(logits[row : row + 1], sampling)[0])


# --- choosing --------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.1, 3.0, -1.0], [5.0, 4.9, 4.8], [-3.0, -2.0, -1.0]])
    for u in (0.0, 0.5, 0.999):
        uniform = torch.full((3,), u, dtype=torch.float64)
        assert choose(logits, Sampling(0.0), uniform).tolist() == [1, 0, 2]
        assert choose(logits, Sampling(0.0, None, 0.9, 0.1), uniform).tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [1e-2, 1e-30, 1e-310])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0], [7.0, -1.0, 2.0]])
    for u in (0.0, 0.5, 0.999):
        assert choose(logits, Sampling(temperature, None), torch.full((2,), u)).tolist() == [1, 0]


@settings(max_examples=40)
@given(logits=rows, u=st.floats(0.0, 1.0, exclude_max=True), k=st.sampled_from([None, 1, 3, 8]))
def test_inverse_transform_sampling(logits: list[float], u: float, k: int | None) -> None:
    kept = keep_top_k(logits, k or len(logits))
    p = softmax(logits, 0.9)
    total = math.fsum(p[i] for i in kept)
    below = 0.0
    expected = max(kept)
    for i in sorted(kept):
        edge = below + p[i] / total
        assume(abs(edge - u) > 1e-9)
        if below <= u < edge:
            expected = i
        below = edge
    got = choose(torch.tensor([logits], dtype=torch.float64), Sampling(0.9, k), torch.tensor([u], dtype=torch.float64))
    assert got.tolist() == [expected]


def test_removed_tokens_are_never_chosen() -> None:
    """Not at the ends of the range either, where rounding could reach a neighbor of probability 0."""
    logits = torch.tensor([[-5.0, -6.0, 2.0, 1.0, -9.0, 1.5, -7.0, -8.0]])
    for sampling in (Sampling(1.0, 3), Sampling(1.0, None, 0.9), Sampling(1.0, None, None, 0.2)):
        for u in (0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-24, 1 - 2**-53):
            assert choose(logits, sampling, torch.tensor([u], dtype=torch.float64)).item() in {2, 3, 5}
        first = choose(logits, sampling, torch.tensor([0.0], dtype=torch.float64)).item()
        last = choose(logits, sampling, torch.tensor([1 - 2**-53], dtype=torch.float64)).item()
        assert (first, last) == (2, 5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.6, 5), Sampling(1.4, None, 0.7), Sampling(1.0, None, None, 0.15)],
)
def test_frequencies(sampling: Sampling) -> None:
    """Chi-square of 40000 draws against the reference distribution, and evenly spaced draws exactly."""
    logits = (2 * torch.randn(20, generator=torch.Generator().manual_seed(3))).tolist()
    p = softmax(logits, sampling.temperature)
    kept = set(range(20))
    if sampling.top_k is not None:
        kept &= keep_top_k(p, sampling.top_k)
    if sampling.top_p is not None:
        kept &= keep_top_p(p, sampling.top_p)
    if sampling.min_p is not None:
        kept &= keep_min_p(p, sampling.min_p)
    total = math.fsum(p[i] for i in kept)
    n = 40_000
    tiled = torch.tensor([logits]).expand(n, -1)
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = torch.bincount(choose(tiled, sampling, uniform), minlength=20).tolist()
    assert sum(counts[i] for i in range(20) if i not in kept) == 0
    chi = math.fsum((counts[i] - n * p[i] / total) ** 2 / (n * p[i] / total) for i in kept)
    freedom = len(kept) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5
    even = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = torch.bincount(choose(tiled, sampling, even), minlength=20).tolist()
    for i in kept:
        assert counts[i] == pytest.approx(n * p[i] / total, abs=1.01)


def test_a_row_depends_on_its_own_logits_and_draw() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50, 30, generator=generator)
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    for sampling in (Sampling(0.8, 7), Sampling(0.8, None, 0.9, 0.05)):
        together = choose(logits, sampling, uniform).tolist()
        assert (
            together
            == [choose(logits[i : i + 1], sampling, uniform[i : i + 1]).item() for i in reversed(range(50))][::-1]
        )
        assert len(set(together)) > 5


def test_inputs_are_not_modified() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(6))
    before = logits.clone()
    choose(logits, Sampling(0.5, 3, 0.9, 0.1), torch.tensor([0.1, 0.5, 0.9]))
    assert torch.equal(logits, before)


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_k": math.nan},
        {"temperature": True},
        {"temperature": None},
        {"temperature": "1"},
        {"top_p": True},
        {"min_p": "0.1"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": math.nan},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(wrong: dict[str, float]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        Sampling(**wrong)


def test_numpy_values_and_limits_are_accepted() -> None:
    sampling = Sampling(np.float64(0.5), np.int64(3), np.float32(0.5), np.float64(0.25))
    assert sampling == Sampling(0.5, 3, 0.5, 0.25)
    assert [type(value) for value in vars(sampling).values()] == [float, int, float, float]
    assert Sampling(0, 1, 1, 0) == Sampling(0.0, 1, 1.0, 0.0)
    assert Sampling(min_p=1).min_p == 1.0


@pytest.mark.parametrize("sampling", [Sampling(0.0), ALL, Sampling(1.0, 2, 0.9, 0.1)])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_nan_and_infinite_logits_raise(sampling: Sampling, row: list[float]) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], row])
    with pytest.raises(FloatingPointError, match="nan"):
        choose(logits, sampling, torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("sampling", [Sampling(0.0), ALL])
def test_a_token_of_probability_zero_is_allowed(sampling: Sampling) -> None:
    logits = torch.tensor([[-math.inf, 2.0, -math.inf]])
    assert choose(logits, sampling, torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]
