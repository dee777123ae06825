"""Decoding against a loop that calls the model on the last T ids, one row at a time."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT
from niels_gpt.inference.decoding import Decoder, EngineDecoder, decoder_for
from niels_gpt.inference.one_token import OneToken
from niels_gpt.inference.sampling import Sampling
from niels_gpt.kernels import replaced
from niels_gpt.system.rng import generator as make_generator
from tests.inference import models
from tests.inference.models import GREEDY, check_engine_decoder, seeded

T, V = 16, 256
SAMPLED = Sampling(temperature=1.2, top_k=40)
SAMPLINGS = [
    GREEDY,
    SAMPLED,
    Sampling(1.0, None, 0.9),
    Sampling(1.5, None, None, 0.02),
    Sampling(0.7, repetition_penalty=1.5),
]


@functools.cache
def model(dtype: torch.dtype = torch.float64) -> GPT:
    return models.spread_model(dtype=dtype)


def naive(prompt: list[int], steps: int, gpt: GPT | None = None) -> list[int]:
    return [*prompt, *models.naive_greedy(gpt or model(), prompt, steps)]


def run(decoder: Decoder, steps: int) -> list[list[int]]:
    """Decode and check that each step appends one token to the active rows only."""
    for _ in range(steps):
        before, active = [list(ids) for ids in decoder.ids], list(decoder.active)
        new = decoder.step()
        assert sorted(new) == sorted(active)
        for row, ids in enumerate(before):
            assert decoder.ids[row] == ([*ids, new[row]] if row in new else ids)
    return decoder.ids


def alone(
    prompt: list[int], steps: int, sampling: Sampling, generator: torch.Generator | None, use_cache: bool
) -> list[int]:
    decoder = Decoder(
        model(), [prompt], max_new_tokens=steps, sampling=sampling, generator=generator, use_cache=use_cache
    )
    return run(decoder, steps)[0]


prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=2 * T)


def test_model_is_sensitive_to_the_whole_window() -> None:
    """Guards the comparisons: continuations vary, and the first token of the window matters."""
    first, second = naive([72, 105], 60), naive([1, 105], 60)
    assert len(set(first)) > 15 and first[2:] != second[2:]
    changed = 0
    for seed in range(20):
        window = torch.randint(V, (1, T), generator=seeded(seed))
        other = window.clone()
        other[0, 0] = (other[0, 0] + 1) % V
        with torch.no_grad():
            changed += int(model()(window)[0, -1].argmax() != model()(other)[0, -1].argmax())
    assert changed >= 3


@pytest.mark.parametrize(("length", "use_cache"), [(1, True), (T - 1, True), (T, True), (T, False), (T + 1, True)])
def test_greedy_equals_the_naive_loop(length: int, use_cache: bool) -> None:
    prompt = torch.randint(V, (length,), generator=seeded(length)).tolist()
    assert alone(prompt, 2 * T, GREEDY, None, use_cache) == naive(prompt, 2 * T)


def test_repeated_tokens_of_prompt_and_continuation_are_penalized() -> None:
    ids = [72, 105, 72]
    for _ in range(2 * T):
        with torch.no_grad():
            logits = model()(torch.tensor([ids[-T:]]))[0, -1].tolist()
        ids.append(max(range(V), key=lambda i: logits[i] * (1.0 if i not in ids else 5.0 if logits[i] < 0 else 0.2)))
    sampling = Sampling(0.0, repetition_penalty=5.0)
    assert [alone([72, 105, 72], 2 * T, sampling, None, use_cache) for use_cache in (True, False)] == [ids, ids]
    assert len(set(ids)) > len(set(naive([72, 105, 72], 2 * T)))


def test_greedy_uses_no_generator() -> None:
    state, generator = torch.get_rng_state(), seeded(5)
    before = generator.get_state()
    alone([1, 2, 3], 5, GREEDY, generator, True)
    alone([1, 2, 3], 5, GREEDY, None, True)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(generator.get_state(), before)


@settings(max_examples=8)
@given(
    batch=st.lists(prompts, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    sampling=st.sampled_from(SAMPLINGS),
    batch_cache=st.booleans(),
)
def test_cached_uncached_and_batched_ids_are_equal(
    batch: list[list[int]], seed: int, sampling: Sampling, batch_cache: bool
) -> None:
    steps = T + 4
    single = [alone(p, steps, sampling, seeded(seed + i), False) for i, p in enumerate(batch)]
    assert [alone(p, steps, sampling, seeded(seed + i), True) for i, p in enumerate(batch)] == single
    decoder = Decoder(
        model(),
        batch,
        max_new_tokens=steps,
        sampling=sampling,
        generator=[seeded(seed + i) for i in range(len(batch))],
        use_cache=batch_cache,
    )
    assert run(decoder, steps) == single


def test_rows_that_share_a_generator_get_derived_streams() -> None:
    """Row i uses the generator derived from one draw and i, so equal prompts differ and a row is reproducible."""
    decoder = Decoder(model(), [[5, 6]] * 3, max_new_tokens=12, sampling=SAMPLED, generator=seeded(3))
    rows = run(decoder, 12)
    assert len({tuple(ids) for ids in rows}) == 3
    base = int(torch.randint(2**62, (1,), generator=seeded(3)))
    assert rows == [alone([5, 6], 12, SAMPLED, make_generator(base, "row", row), True) for row in range(3)]


def test_none_is_the_default_generator() -> None:
    torch.manual_seed(11)
    first = alone([1, 2], 15, SAMPLED, None, True)
    assert alone([1, 2], 15, SAMPLED, None, True) != first  # the state has advanced
    torch.manual_seed(11)
    assert alone([1, 2], 15, SAMPLED, None, True) == first
    state = torch.get_rng_state()
    Decoder(model(), [[1, 2], [3]], max_new_tokens=9, sampling=SAMPLED, generator=seeded(1)).step()
    assert torch.equal(torch.get_rng_state(), state)  # a given generator leaves it alone


def test_frequencies_of_the_next_token() -> None:
    """1000 rows of one prompt: chi-square against the softmax of the model's logits."""
    prompt, n, temperature, k = [3, 1, 4], 1000, 2.0, 12
    decoder = Decoder(model(), [prompt] * n, max_new_tokens=1, sampling=Sampling(temperature, k), generator=seeded(6))
    with torch.no_grad():
        logits = model()(torch.tensor([prompt[-T:]]))[0, -1].tolist()
    best = sorted(range(V), key=lambda i: -logits[i])[:k]
    weights = {i: math.exp((logits[i] - logits[best[0]]) / temperature) for i in best}
    total = math.fsum(weights.values())
    drawn = list(decoder.step().values())
    assert set(drawn) <= set(best)
    chi = math.fsum((drawn.count(i) - n * w / total) ** 2 / (n * w / total) for i, w in weights.items())
    assert chi < (k - 1) + 5 * math.sqrt(2 * (k - 1))


@settings(max_examples=8)
@given(
    batch=st.lists(prompts, min_size=2, max_size=5),
    ends=st.lists(st.integers(0, T + 6), min_size=5, max_size=5),
    sampling=st.sampled_from([GREEDY, SAMPLED]),
    use_cache=st.booleans(),
)
def test_finished_rows_do_not_affect_the_others(
    batch: list[list[int]], ends: list[int], sampling: Sampling, use_cache: bool
) -> None:
    steps = T + 6
    generators = [seeded(i) for i in range(len(batch))]
    decoder = Decoder(
        model(), batch, max_new_tokens=steps, sampling=sampling, generator=generators, use_cache=use_cache
    )
    for step in range(steps):
        for row in [row for row in decoder.active if ends[row] <= step]:
            decoder.finish(row)
        if decoder.active:
            assert sorted(decoder.step()) == [row for row in range(len(batch)) if ends[row] > step]
    for row, prompt in enumerate(batch):
        expected = alone(prompt, steps, sampling, seeded(row), False)
        assert decoder.ids[row] == expected[: len(prompt) + ends[row]]


def test_tokens_yields_until_every_row_is_done() -> None:
    decoder = Decoder(model(), [[1, 2], [3]], max_new_tokens=4, sampling=GREEDY)
    seen = []
    for row, tokens in decoder.tokens():
        seen.append((row, tokens))
        if row == 1 and len(seen) >= 4:
            decoder.finish(1)
    expected = [naive([1, 2], 4)[2:], naive([3], 4)[1:]]
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3)]
    assert seen == [(row, [expected[row][i]]) for row, i in order]
    assert decoder.active == [0]
    assert list(Decoder(model(), [[1]], max_new_tokens=0, sampling=GREEDY).tokens()) == []


def widths(monkeypatch: pytest.MonkeyPatch, prompt: list[int], steps: int, use_cache: bool) -> list[int]:
    """Return how many tokens each forward pass computed."""
    seen: list[int] = []
    one_token, hidden = OneToken.__call__, GPT.hidden
    with monkeypatch.context() as patch:
        patch.setattr(OneToken, "__call__", lambda self, ids, cache: (seen.append(1), one_token(self, ids, cache))[1])
        patch.setattr(GPT, "hidden", lambda self, x, **kw: (seen.append(x.shape[1]), hidden(self, x, **kw))[1])
        patch.setattr(replaced, "changed", lambda names: [])  # both compute the same
        alone(prompt, steps, GREEDY, None, use_cache)
    return seen


def test_the_cache_is_used_up_to_T_and_the_window_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widths(monkeypatch, [1, 2, 3], T, True) == [3] + [1] * (T - 3) + [T] * 2
    assert widths(monkeypatch, [1, 2, 3], T, False) == [*range(3, T + 1), T, T]
    assert widths(monkeypatch, list(range(T + 9)), 3, True) == [T, T, T]


def test_the_cache_has_the_size_that_is_needed() -> None:
    for prompt, new, capacity in (([1, 2, 3], 4, 7), ([1, 2, 3], 50, T)):
        decoder = Decoder(model(), [prompt, [5]], max_new_tokens=new, sampling=GREEDY)
        decoder.step()
        assert decoder._cache is not None and capacity == decoder._cache.T


def test_errors() -> None:
    with pytest.raises(ValueError, match=f"prompt 1.*{V - 1}.*{V}"):
        Decoder(model(), [[5], [1, V]], max_new_tokens=3, sampling=GREEDY)
    for number in (-1, 10**12, 3.0):
        with pytest.raises(ValueError, match=rf"max_new_tokens.*0.*1000000.*{number}"):
            Decoder(model(), [[1]], max_new_tokens=number, sampling=SAMPLED)
    with pytest.raises(ValueError, match=r"2.*3"):
        Decoder(model(), [[1]] * 3, max_new_tokens=2, sampling=SAMPLED, generator=[seeded(0), seeded(1)])


@pytest.mark.parametrize("rows", [1, 5])
def test_engine_decoder_gives_the_same_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niels_gpt.inference.decoding.MAX_ROWS", 2)
    batch = [list(range(1 + 2 * n, 3 + 5 * n)) for n in range(rows)]
    options = {"max_new_tokens": T + 3, "sampling": SAMPLED}
    decoder = EngineDecoder(model(), batch, **options, generator=seeded(4))
    assert decoder._engine._num_slots == min(rows, 2)
    check_engine_decoder(decoder, Decoder(model(), batch, **options, generator=seeded(4)))
    assert list(EngineDecoder(model(), [[1]], max_new_tokens=0, sampling=GREEDY).tokens()) == []


def test_decoder_for_picks_the_engine_where_graphs_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(batch: list[list[int]], **options: bool) -> type:
        return type(decoder_for(model(), batch, max_new_tokens=1, sampling=GREEDY, **options))

    assert kind([[1]]) is Decoder
    monkeypatch.setattr("niels_gpt.inference.decoding.cuda_slots.usable", lambda model: True)
    monkeypatch.setattr("niels_gpt.inference.decoding.EngineDecoder", lambda *args, **options: 0)
    assert [kind([[1]]), kind([[1]], use_cache=False), kind([])] == [int, Decoder, Decoder]
