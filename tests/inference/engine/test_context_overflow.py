"""Past T with context_overflow="half": the tokens of a naive decoder that crops its context once in a while."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.slots import PlainSlots
from niels_gpt.inference.sampling import Sampling, choose
from tests.inference.engine import GREEDY, KINDS, SAMPLED, T, alone, finish, model, prompt_of
from tests.inference.models import seeded


@torch.no_grad()
def naive_half(gpt, prompt: list[int], number: int, sampling: Sampling, seed: int, pinned: int = 0) -> list[int]:
    """One forward pass over the context per token; a context longer than T becomes its newest half."""
    draws = torch.rand(number, generator=seeded(seed), dtype=torch.float64)
    context, tokens, T = list(prompt), [], gpt.config.T
    pinned = min(pinned, T // 2, len(prompt) - 1)
    for draw in draws:
        if len(context) > T:
            newest = max(T // 2 - pinned, T // 4, 1)
            context = [*context[:pinned], *context[-newest:]]
        token = int(choose(gpt(torch.tensor([context], device=gpt.device))[:, -1], sampling, draw[None])[0])
        tokens.append(token)
        context.append(token)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [2, None])
def test_tokens_of_requests_past_the_window(kind, chunk):
    gpt = model(kind)
    engine = Engine(gpt, slots=3, chunk=chunk, context_overflow="half")
    lengths = [1, 5, T - 1, T, T + 1, 3 * T]
    requests = [engine.submit(prompt_of(n, n), max_new_tokens=30, sampling=SAMPLED, seed=n) for n in lengths]
    finish(engine)
    for n, request in zip(lengths, requests, strict=True):
        assert request.tokens == naive_half(gpt, prompt_of(n, n), 30, SAMPLED, n), n
        assert request.ids[:n] == prompt_of(n, n)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2 * T), st.integers(1, 25), st.integers(0, 12), st.integers(0, T)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
    st.sampled_from([0, 30, 500]),
)
def test_with_others_pinned_tokens_and_a_prefix_cache(wanted, slots, prefix_tokens):
    gpt = model("v1")
    engine = Engine(gpt, slots=slots, prefix_tokens=prefix_tokens, context_overflow="half")
    made = {}
    for step in range(500):
        for i, (length, number, join, pinned) in enumerate(wanted):
            if join == step:
                prompt = prompt_of(length, i % 2)
                made[i] = engine.submit(prompt, max_new_tokens=number, sampling=GREEDY, pinned=pinned)
        engine.step()
        if len(made) == len(wanted) and not engine.busy:
            break
    for i, (length, number, _, pinned) in enumerate(wanted):
        assert made[i].tokens == naive_half(gpt, prompt_of(length, i % 2), number, GREEDY, 0, pinned)


def test_no_window_is_recomputed(monkeypatch):
    """Past T tokens come from the KV cache; the context is read once per half."""
    read = []
    original = PlainSlots.read
    monkeypatch.setattr(PlainSlots, "window", None)
    monkeypatch.setattr(PlainSlots, "read", lambda *args: (read.append(args[2]), original(*args)))
    engine = Engine(model(), slots=1, context_overflow="half")
    engine.submit(prompt_of(T, 1), max_new_tokens=1 + 3 * (T // 2 + 1), sampling=GREEDY)
    finish(engine)
    assert read == [T - 1, *[T // 2 - 1] * 3]


def test_within_the_window_both_are_the_same():
    for overflow in ("slide", "half"):
        engine = Engine(model(), context_overflow=overflow)
        request = engine.submit(prompt_of(5, 1), max_new_tokens=T + 1 - 5, sampling=SAMPLED, seed=1)
        finish(engine)
        assert request.tokens == alone(model(), prompt_of(5, 1), T + 1 - 5, SAMPLED, 1)


def test_a_full_request_can_be_cancelled_and_closed():
    engine = Engine(model(), slots=2, context_overflow="half")
    requests = [engine.submit(prompt_of(T, i), max_new_tokens=9, sampling=GREEDY) for i in range(2)]
    while not all(request.received for request in requests):
        engine.step()
    assert engine._full and engine.busy
    engine.cancel(requests[0])
    engine.step()
    assert requests[0].finished == "cancelled" and requests[1].finished is None
    engine.close()
    assert requests[1].finished == "cancelled" and not engine.busy


def test_a_window_of_one_token():
    from niels_gpt import GPT, ModelConfig

    gpt = GPT(ModelConfig(V=30, T=1, C=8, L=1, H=1, dropout=0.0)).eval()
    engine = Engine(gpt, context_overflow="half", prefix_tokens=5)
    request = engine.submit([3, 4], max_new_tokens=5, sampling=GREEDY)
    finish(engine)
    assert request.tokens == naive_half(gpt, [3, 4], 5, GREEDY, 0)
