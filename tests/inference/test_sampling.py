"""Sampling against filters for one row in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from niels_gpt.inference.sampling import Sampling, choose, penalize_repetition, probabilities

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


@settings(max_examples=120)
@given(
    logits=rows,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    k=st.none() | st.integers(1, 30),
    top_p=st.none() | st.floats(0.01, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
)
def test_a_token_stays_if_every_filter_keeps_it(
    logits: list[float], temperature: float, k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Each filter sees the full distribution."""
    p = softmax(logits, temperature)
    kept = keep_top_k(p, k or len(p))
    if top_p is not None:
        ordered = [p[i] for i in by_rank(p)]
        sums = [math.fsum(ordered[:n]) for n in range(1, len(p))]
        assume(all(abs(s - top_p) > 1e-9 for s in sums))  # at a tie the last bit decides
        kept &= keep_top_p(p, top_p)
    if min_p is not None:
        assume(all(abs(x - min_p * max(p)) > 1e-9 * max(p) for x in p if x < max(p)))
        kept &= keep_min_p(p, min_p)
    check(logits, Sampling(temperature, k, top_p, min_p), kept)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, 1), {1}),
        (Sampling(1.0, 2), {1, 3}),
        (Sampling(1.0, 99), {0, 1, 2, 3}),
        (Sampling(1.0, None, 0.35), {1}),
        (Sampling(1.0, None, 0.45), {1, 3}),
        (Sampling(1.0, None, 1.0), {0, 1, 2, 3}),
        (Sampling(1.0, None, 1e-9), {1}),  # the most likely token always stays
        (Sampling(1.0, None, None, 0.6), {1, 3}),
        (Sampling(1.0, None, None, 1.0), {1}),
        (Sampling(1.0, None, None, 0.0), {0, 1, 2, 3}),
        (Sampling(1.0, 2, 0.6), {1, 3}),  # top_p of the full distribution
        (Sampling(0.5, None, 0.5), {1}),  # temperature comes first: (1, 16, 4, 9) / 30
        (Sampling(0.5, None, None, 0.5), {1, 3}),
        (Sampling(0.5, None, None, 0.6), {1}),
    ],
)
def test_filters_by_hand(sampling: Sampling, kept: set[int]) -> None:
    check([math.log(x) for x in (0.1, 0.4, 0.2, 0.3)], sampling, kept)


def test_equal_logits() -> None:
    """With ties at rank k at least k tokens stay, and they are equally likely."""
    got = normal(probabilities(torch.zeros(1, 8), Sampling(1.0, 3))[0])
    kept = [x for x in got if x > 0]
    assert len(kept) >= 3 and max(kept) == pytest.approx(min(kept))


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.1, 3.0, -1.0], [5.0, 4.9, 4.8], [-3.0, -2.0, -1.0]])
    for u in (0.0, 0.5, 0.999):
        uniform = torch.full((3,), u, dtype=torch.float64)
        assert choose(logits, Sampling(0.0), uniform).tolist() == [1, 0, 2]
        assert choose(logits, Sampling(0.0, None, 0.9, 0.1), uniform).tolist() == [1, 0, 2]


@given(
    table=st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.0]), min_size=9, max_size=9), min_size=1, max_size=4),
    k=st.integers(1, 10),
)
def test_top_k_keeps_exactly_k_of_equal_tokens_those_with_the_lower_ids(table: list[list[float]], k: int) -> None:
    """A row gives the same alone and in a batch."""
    batch = probabilities(torch.tensor(table), Sampling(0.7, k))
    for row, got in zip(table, batch, strict=True):
        assert set(got.nonzero().flatten().tolist()) == keep_top_k([x + 0.0 for x in row], k)
        check(row, Sampling(0.7, k), keep_top_k([x + 0.0 for x in row], k))


def test_broken_logits_with_ties_are_an_error() -> None:
    logits = torch.tensor([[math.nan, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    with pytest.raises(FloatingPointError):
        choose(logits, Sampling(1.0, 2), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("temperature", [1e-2, 1e-30, 1e-310])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0], [7.0, -1.0, 2.0]])
    for u in (0.0, 0.5, 0.999):
        assert choose(logits, Sampling(temperature, None), torch.full((2,), u)).tolist() == [1, 0]


@settings(max_examples=40)
@given(
    table=st.lists(st.lists(st.floats(-9, 9, width=32), min_size=6, max_size=6), min_size=1, max_size=3),
    seen=st.lists(st.sets(st.integers(0, 8)), min_size=3, max_size=3),
    penalty=st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0]),
)
def test_the_repetition_penalty_is_that_of_transformers(
    table: list[list[float]], seen: list[set[int]], penalty: float
) -> None:
    """Ids above the logits are those of a prompt that the model never samples."""
    logits = torch.tensor(table)
    expected = logits.clone()
    for row, tokens in enumerate(seen[: len(table)]):
        ids = torch.tensor([[i for i in tokens if i < 6]], dtype=torch.long)
        if ids.numel():
            expected[row] = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1])[0]
    assert torch.equal(penalize_repetition(logits, seen[: len(table)], penalty), expected)
    got = choose(logits, Sampling(0.0, repetition_penalty=penalty), torch.zeros(len(table)), seen[: len(table)])
    assert got.tolist() == expected.argmax(1).tolist()


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


def test_a_row_depends_on_its_own_logits_and_draw() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50, 30, generator=generator)
    uniform, before = torch.rand(50, generator=generator, dtype=torch.float64), logits.clone()
    for sampling in (Sampling(0.8, 7), Sampling(0.8, None, 0.9, 0.05)):
        together = choose(logits, sampling, uniform).tolist()
        assert together == [choose(logits[i : i + 1], sampling, uniform[i : i + 1]).item() for i in range(50)]
        assert len(set(together)) > 5
        assert probabilities(logits, sampling).dtype == torch.float64
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.inf, math.nan, True, None, "1"]),
        ("top_k", [0, 1.5, 2.0, True, math.nan]),
        ("top_p", [0.0, 1.1, math.nan, True]),
        ("min_p", [-0.1, 1.5, math.nan, "0.1"]),
        ("repetition_penalty", [0.0, -1.0, 0.0099, 100.1, math.nan, math.inf, None, True, "1"]),
    ],
)
def test_values_out_of_range_are_named(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}.*{value}"):
            Sampling(**{name: value})


def test_numpy_values_and_limits_are_accepted() -> None:
    sampling = Sampling(np.float64(0.5), np.int64(3), np.float32(0.5), np.float64(0.25))
    assert sampling == Sampling(0.5, 3, 0.5, 0.25)
    assert [type(value) for value in vars(sampling).values()] == [float, int, float, float, float]
    assert Sampling(0, 1, 1, 0) == Sampling(0.0, 1, 1.0, 0.0)
    assert Sampling(min_p=1).min_p == 1.0


@pytest.mark.parametrize(
    ("sampling", "row"),
    [
        (Sampling(0.0), [0.0, math.nan, 1.0]),
        (Sampling(0.0), [0.0, math.inf, 1.0]),
        (ALL, [-math.inf] * 3),
        (ALL, [0.0, math.nan, 1.0]),
        (Sampling(1.0, 2, 0.9, 0.1), [0.0, math.inf, 1.0]),
    ],
)
def test_nan_and_infinite_logits_raise(sampling: Sampling, row: list[float]) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], row])
    with pytest.raises(FloatingPointError, match="nan"):
        choose(logits, sampling, torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("sampling", [Sampling(0.0), ALL])
def test_a_token_of_probability_zero_is_allowed(sampling: Sampling) -> None:
    logits = torch.tensor([[-math.inf, 2.0, -math.inf]])
    assert choose(logits, sampling, torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]
