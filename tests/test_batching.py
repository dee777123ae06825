import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.batching import gather_rows, get_batch, plan_batch

SOURCES = {
    "wiki": b"abcdefghijklmnopqrstuvwxyz" * 50,
    "roam": b"0123456789" * 200,
    "primer": b"system: x\nuser: y\nassistant: z\n" * 50,
}
P = {"wiki": 0.784, "roam": 0.196, "primer": 0.020}


def seeded(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def literal_batch(sources, *, p, B, T, generator):
    """The procedure of the spec, literally."""
    names = sorted(p)
    probabilities = torch.tensor([p[name] for name in names], dtype=torch.float32)
    choices = torch.multinomial(probabilities, B, replacement=True, generator=generator)
    xs, ys, origins = [], [], []
    for choice in choices.tolist():
        src = sources[names[choice]]
        i = torch.randint(0, len(src) - (T + 1) + 1, (1,), generator=generator).item()
        chunk = src[i : i + T + 1]
        xs.append(list(chunk[:-1]))
        ys.append(list(chunk[1:]))
        origins.append((names[choice], i))
    return torch.tensor(xs, dtype=torch.int64), torch.tensor(ys, dtype=torch.int64), origins


def batch(seed=0, *, sources=SOURCES, p=P, B=8, T=16):
    return get_batch(sources, p=p, B=B, T=T, device="cpu", generator=seeded(seed))


# --- spec --------------------------------------------------------------------------------------------


def test_shapes_types_range_and_shift():
    x, y = batch()
    for ids in (x, y):
        assert ids.shape == (8, 16)
        assert ids.dtype == torch.int64
        assert ids.device.type == "cpu"
        assert 0 <= ids.min() <= ids.max() <= 255
    assert torch.equal(y[:, :-1], x[:, 1:])


def test_same_seed_gives_the_same_batch():
    x1, y1 = batch(0)
    x2, y2 = batch(0)
    assert torch.equal(x1, x2)
    assert torch.equal(y1, y2)
    assert not torch.equal(batch(1)[0], x1)


def test_batch_equals_the_literal_procedure():
    ours, theirs = seeded(3), seeded(3)
    for _ in range(2):  # the second batch continues with the generator state of the first
        x, y = get_batch(SOURCES, p=P, B=32, T=24, device="cpu", generator=ours)
        wanted_x, wanted_y, _ = literal_batch(SOURCES, p=P, B=32, T=24, generator=theirs)
        assert x.tolist() == wanted_x.tolist() and y.tolist() == wanted_y.tolist()
    assert torch.equal(ours.get_state(), theirs.get_state())


@given(
    streams=st.lists(st.binary(min_size=9, max_size=60), min_size=1, max_size=5),
    weights=st.data(),
    B=st.integers(1, 12),
    T=st.integers(1, 8),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_sources_equal_the_literal_procedure(streams, weights, B, T, seed):
    sources = {f"source {i}": data for i, data in enumerate(streams)}
    numbers = weights.draw(st.lists(st.integers(0, 9), min_size=len(streams), max_size=len(streams)).filter(any))
    order = weights.draw(st.permutations(list(sources)))  # p may have another order than the sources
    p = {name: number / sum(numbers) for name, number in zip(order, numbers, strict=True)}
    x, y = get_batch(sources, p=p, B=B, T=T, device="cpu", generator=seeded(seed))
    wanted_x, wanted_y, _ = literal_batch(sources, p=p, B=B, T=T, generator=seeded(seed))
    assert torch.equal(x, wanted_x)
    assert torch.equal(y, wanted_y)


def test_probabilities_are_float32():
    """With thousands of sources, float32 and float64 give different choices."""
    sources = {f"source {i}": i.to_bytes(2, "big") for i in range(4000)}
    p = dict.fromkeys(sources, 1 / 4000)
    x, y = batch(0, sources=sources, p=p, B=2000, T=1)
    wanted_x, wanted_y, origins = literal_batch(sources, p=p, B=2000, T=1, generator=seeded(0))
    assert torch.equal(x, wanted_x)
    assert torch.equal(y, wanted_y)
    double = torch.multinomial(torch.full((4000,), 1 / 4000, dtype=torch.float64), 2000, True, generator=seeded(0))
    assert [f"source {i}" for i in double.tolist()] != [name for name, _ in origins]  # the premise of this test


def test_generator_none_is_the_default_generator():
    torch.manual_seed(3)
    wanted_x, wanted_y, _ = literal_batch(SOURCES, p=P, B=16, T=8, generator=None)
    after = torch.rand(3)
    torch.manual_seed(3)
    x, y = get_batch(SOURCES, p=P, B=16, T=8, device="cpu")
    assert torch.equal(x, wanted_x)
    assert torch.equal(y, wanted_y)
    assert torch.equal(torch.rand(3), after)


def test_golden_batch():
    """Pinned: the names are sorted (primer, roam, wiki)."""
    x, y = batch(1234, B=4, T=6)
    assert [bytes(row) for row in x.tolist()] == [b"pqrstu", b"901234", b"defghi", b"rstuvw"]
    assert [bytes(row) for row in y.tolist()] == [b"qrstuv", b"012345", b"efghij", b"stuvwx"]


@pytest.mark.parametrize("keys", itertools.permutations(P))
def test_the_order_of_the_keys_does_not_change_the_batch(keys):
    sources = {name: SOURCES[name] for name in reversed(keys)}
    x, y = batch(7, p={name: P[name] for name in keys}, sources=sources)
    assert torch.equal(x, batch(7)[0]) and torch.equal(y, batch(7)[1])


def test_only_the_given_generator_is_used(random_states):
    before = random_states()
    wanted = batch(5)[0]
    assert random_states() == before
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(batch(5)[0], wanted)


def test_default_T_is_256():
    x, _ = get_batch(SOURCES, p=P, B=2, device="cpu", generator=seeded(0))
    assert x.shape == (2, 256)


# --- rows --------------------------------------------------------------------------------------------


def test_x_and_y_do_not_share_memory():
    data = bytes(range(30))
    x, y = batch(0, sources={"a": data}, p={"a": 1.0}, B=2, T=5)
    kept = y.clone()
    x.fill_(7)
    assert torch.equal(y, kept)
    assert data == bytes(range(30))


def test_plan_is_the_provenance():
    plan = plan_batch(SOURCES, p=dict(sorted(P.items())), B=16, T=12, generator=seeded(2))
    _, _, origins = literal_batch(SOURCES, p=P, B=16, T=12, generator=seeded(2))
    assert [(plan.names[i], start) for i, start in zip(plan.source, plan.start, strict=True)] == origins
    x, y = gather_rows(SOURCES, plan, T=12, device="cpu")
    for row, (name, start) in enumerate(origins):
        assert bytes(x[row].tolist()) == SOURCES[name][start : start + 12]
        assert bytes(y[row].tolist()) == SOURCES[name][start + 1 : start + 13]
    assert torch.equal(x, batch(2, B=16, T=12)[0])


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p",
    [
        {"wiki": 0.5, "roam": 0.3, "primer": 0.1},
        {"wiki": 0.5, "roam": 0.3, "primer": 0.2 + 2e-6},
        {"wiki": 1.2, "roam": -0.3, "primer": 0.1},
        {"wiki": float("nan"), "roam": 0.5, "primer": 0.5},
        {"wiki": 0.0, "roam": 0.0, "primer": 0.0},
    ],
)
def test_invalid_probabilities_raise(p):
    with pytest.raises(ValueError):
        batch(p=p)


def test_probabilities_may_differ_from_1_by_rounding():
    for rounding in (9e-7, -9e-7):
        x, y = batch(p={"wiki": 0.5, "roam": 0.3, "primer": 0.2 + rounding})
        assert x.shape == y.shape and x.numel() > 0


def test_keys_of_p_and_sources_must_match():
    with pytest.raises(ValueError, match="primer"):
        batch(p={"wiki": 0.8, "roam": 0.2})
    with pytest.raises(ValueError, match="books"):
        batch(p={**P, "books": 0.0})
    with pytest.raises(ValueError):
        batch(sources={}, p={})


def test_short_sources_are_listed_with_their_lengths():
    sources = {"wiki": b"w" * 17, "roam": b"r" * 16, "primer": b""}
    with pytest.raises(ValueError) as caught:
        batch(sources=sources)
    for part in ("roam", "16", "primer", "0", "17"):
        assert part in str(caught.value)
    assert "wiki" not in str(caught.value)


@pytest.mark.parametrize(("B", "T"), [(0, 16), (4, 0)])
def test_B_or_T_below_1_raises(B, T):
    with pytest.raises(ValueError, match=f"B={B}, T={T}"):
        batch(B=B, T=T)


def test_errors_do_not_advance_the_generator():
    generator = seeded(3)
    before = generator.get_state()
    with pytest.raises(ValueError):
        get_batch(SOURCES, p={"wiki": 1.0}, B=4, T=16, device="cpu", generator=generator)
    with pytest.raises(ValueError):
        get_batch(SOURCES, p=P, B=4, T=10**6, device="cpu", generator=generator)
    assert torch.equal(generator.get_state(), before)
