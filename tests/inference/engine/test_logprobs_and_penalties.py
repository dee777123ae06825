"""Requests with log-probabilities, penalties and biases, against a naive decoder, beside simple requests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.inference import logprobs
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.sampling import choose
from tests.inference.engine import GREEDY, KINDS, SAMPLED, T, V, alone, finish, model, prompt_of
from tests.inference.models import seeded


@torch.no_grad()
def naive(gpt, prompt, number, sampling, seed, *, presence=0.0, frequency=0.0, bias=None):
    """Return the tokens and the raw logits (number, V) they were chosen from, window by window."""
    repetition, sampling = sampling.repetition_penalty, replace(sampling, repetition_penalty=1.0)
    draws = torch.rand(number, generator=seeded(seed), dtype=torch.float64)
    ids, raw = list(prompt), []
    for draw in draws:
        logits = gpt(torch.tensor([ids[-T:]], device=gpt.device))[0, -1]
        raw.append(logits)
        changed = logits.clone()
        for token in range(V):
            times = ids[len(prompt) :].count(token)
            changed[token] += (bias or {}).get(token, 0.0) - frequency * times - (presence if times else 0.0)
            if token in ids:
                changed[token] *= repetition if changed[token] < 0 else 1 / repetition
        ids.append(int(choose(changed[None], sampling, draw[None])[0]))
    return ids[len(prompt) :], torch.stack(raw)


def check_logprobs(shown, token: int, logits: torch.Tensor, k: int) -> None:
    p = logits.double().exp() / logits.double().exp().sum()
    assert shown.token == token
    assert shown.logprob == pytest.approx(math.log(p[token]), abs=1e-5)
    assert shown.entropy == pytest.approx(-sum(float(x) * math.log(x) for x in p), abs=1e-5)
    best = p.argsort(descending=True)[:k].tolist()
    assert [i for i, _ in shown.top] == best
    assert [value for _, value in shown.top] == pytest.approx([math.log(p[i]) for i in best], abs=1e-5)


@pytest.fixture(autouse=True, scope="module")
def few_positions():
    """A prompt is scored in several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "POSITIONS", 3)
        yield


OPTIONS = st.fixed_dictionaries(
    {
        "presence": st.sampled_from([0.0, 0.0, 1.5, -1.0]),
        "frequency": st.sampled_from([0.0, 0.0, 0.7, -0.3]),
        "bias": st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 2.0, 100.0]), max_size=2),
        "logprobs": st.sampled_from([None, 0, 1, 5, V]),
        "prompt": st.booleans(),
        "sampling": st.sampled_from(
            [GREEDY, SAMPLED, *(replace(s, repetition_penalty=1.4) for s in (GREEDY, SAMPLED))]
        ),
        "length": st.integers(1, T + 2),
    }
)


@settings(max_examples=30, deadline=None)
@given(st.lists(OPTIONS, min_size=1, max_size=4), st.sampled_from(list(KINDS)), st.integers(1, 3), st.booleans())
def test_requests_with_all_options_at_random(wanted, kind, slots, prefixes):
    gpt = model(kind)
    engine = Engine(gpt, slots=slots, prefix_tokens=100 if prefixes else 0)
    requests, events = [], []
    for seed, options in enumerate(wanted):
        length = options["length"]
        request = engine.submit(
            prompt_of(length, 1),
            max_new_tokens=8,
            sampling=options["sampling"],
            seed=seed,
            logprobs=options["logprobs"],
            prompt_logprobs=options["prompt"] and length <= T,
            presence_penalty=options["presence"],
            frequency_penalty=options["frequency"],
            logit_bias=options["bias"],
        )
        requests.append(request)
    events = finish(engine)
    for seed, (options, request) in enumerate(zip(wanted, requests, strict=True)):
        penalties = {name: options[name] for name in ("presence", "frequency", "bias")}
        prompt, k = prompt_of(options["length"], 1), options["logprobs"]
        tokens, logits = naive(gpt, prompt, 8, options["sampling"], seed, **penalties)
        assert request.tokens == tokens
        mine = [event for event in events if event.request is request]
        if k is None:
            assert all(event.logprobs is None for event in mine)
        else:
            shown = [each for event in mine for each in event.logprobs]
            for each, token, row in zip(shown, tokens, logits, strict=True):
                check_logprobs(each, token, row, k)
        if options["prompt"] and options["length"] <= T:
            with torch.no_grad():
                rows = gpt(torch.tensor([prompt]))[0, :-1]
            for each, token, row in zip(request.prompt_logprobs, prompt[1:], rows, strict=True):
                check_logprobs(each, token, row, k or 0)
        else:
            assert request.prompt_logprobs is None


@torch.no_grad()
def test_a_text_scored_from_any_position():
    gpt, ids = model(), prompt_of(T, 1)
    logits = gpt(torch.tensor([ids]))[0, :-1]
    for first in range(1, T):
        found = logprobs.score_from(gpt, ids, first, 2)
        for shown, token, row in zip(found, ids[first:], logits[first - 1 :], strict=True):
            check_logprobs(shown, token, row, 2)
    assert logprobs.prompt_logprobs(gpt, ids, 2) == logprobs.score_from(gpt, ids, 1, 2)
    assert logprobs.prompt_logprobs(gpt, ids[:1]) == []


def test_prompt_logprobs_come_before_the_first_token():
    engine = Engine(model(), slots=1)
    request = engine.submit(prompt_of(5, 1), max_new_tokens=3, prompt_logprobs=True)
    engine.step()
    assert request.received == 1 and len(request.prompt_logprobs) == 4


def test_a_simple_request_beside_others_is_not_changed():
    engine = Engine(model(), slots=2)
    engine.submit(prompt_of(4, 1), max_new_tokens=8, sampling=GREEDY, logit_bias={3: 100.0}, logprobs=2)
    request = engine.submit(prompt_of(5, 2), max_new_tokens=8, sampling=GREEDY)
    finish(engine)
    assert request.tokens == alone(model(), prompt_of(5, 2), 8, GREEDY, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logprobs": -1}, ["logprobs", "-1"]),
        ({"logprobs": V + 1}, ["logprobs", str(V + 1)]),
        ({"logprobs": 1.5}, ["logprobs", "1.5"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty", "nan"]),
        ({"frequency_penalty": float("inf")}, ["frequency_penalty", "inf"]),
        ({"frequency_penalty": "1"}, ["frequency_penalty", "'1'"]),
        ({"frequency_penalty": True}, ["frequency_penalty", "True"]),
        ({"logit_bias": {V: 1.0}}, ["logit_bias", str(V)]),
        ({"logit_bias": {"1": 1.0}}, ["logit_bias", "'1'"]),
        ({"logit_bias": {1: float("-inf")}}, ["logit_bias", "-inf"]),
        ({"pinned": -1}, ["pinned", "-1"]),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError) as caught:
        Engine(model()).submit([1], max_new_tokens=1, **options)
    assert all(word in str(caught.value) for word in words)


def test_a_prompt_longer_than_the_window_has_no_logprobs():
    with pytest.raises(ValueError, match=f"{T + 1}") as caught:
        Engine(model()).submit(prompt_of(T + 1, 1), max_new_tokens=1, prompt_logprobs=True)
    assert f"T={T}" in str(caught.value)
