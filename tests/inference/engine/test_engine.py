"""Requests in an engine: each gets what it would get alone, whoever comes and goes beside it."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.config import MOST_TOKENS
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine import slots
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.sampling import Sampling

GREEDY = Sampling(0.0, None)
SAMPLED = Sampling(1.3, 7, 0.9)
V, T = 30, 12
_MODELS: dict[str, GPT] = {}


def model(kind: str = "v0") -> GPT:
    """A small model with weights large enough that positions and neighbours matter."""
    if kind not in _MODELS:
        options = {
            "v0": {},
            "v1": {"norm": "rmsnorm", "mlp": "swiglu", "d_ff": 48},
            "learned": {"positions": "learned"},
        }
        torch.manual_seed(0)
        made = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, dropout=0.0, **options[kind])).eval()
        with torch.no_grad():
            for p in made.parameters():
                if p.dim() > 1:
                    p.mul_(8)
        _MODELS[kind] = made
    return _MODELS[kind]


def alone(gpt: GPT, prompt: list[int], number: int, sampling: Sampling, seed: int, stop: frozenset[int] = frozenset()):
    """What the decoder gives without a cache, cut after the first stop id."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(gpt, [prompt], max_new_tokens=number, sampling=sampling, generators=generator, use_cache=False)
    tokens = []
    for _ in range(number):
        tokens.append(decoder.step()[0])
        if tokens[-1] in stop:
            break
    return tokens


def finish(engine: Engine, limit: int = 500) -> list:
    """All events until nothing is left to do."""
    events = []
    for _ in range(limit):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", ["v0", "v1", "learned"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_alone_and_together_through_the_end_of_the_window(kind, sampling):
    engine = Engine(model(kind), slots=3)
    lengths = [1, 2, 5, T - 1, T, T + 1, 2 * T]
    requests = [
        engine.submit(prompt_of(n, n), max_new_tokens=9, sampling=sampling, seed=n) for n in lengths
    ]  # more than there are slots: some wait
    events = finish(engine)
    for n, request in zip(lengths, requests, strict=True):
        want = alone(model(kind), prompt_of(n, n), 9, sampling, n)
        assert request.tokens == want, n
        assert request.finished == "length"
        mine = [event for event in events if event.request is request]
        assert [token for event in mine for token in event.tokens] == want
        assert [event.finished for event in mine] == [None] * 8 + ["length"]  # one by one on a CPU


requests_strategy = st.lists(
    st.tuples(
        st.integers(1, 2 * T),  # prompt
        st.integers(1, 16),  # new tokens
        st.sampled_from([GREEDY, SAMPLED, Sampling(0.8, None, None, 0.1)]),
        st.integers(0, 12),  # steps before it joins
        st.one_of(st.none(), st.integers(0, 12)),  # steps after which it is cancelled
        st.frozensets(st.integers(0, V - 1), max_size=3),
    ),
    min_size=1,
    max_size=7,
)


@given(requests_strategy, st.integers(1, 4), st.integers(1, 30))
def test_requests_join_and_leave_at_random(wanted, slots, chunk):
    engine = Engine(model("v1"), slots=slots, chunk=chunk)
    made: dict[int, Request] = {}
    ends: dict[int, int] = {}
    seen: dict[int, list[int]] = {i: [] for i in range(len(wanted))}
    late: list[int] = []
    for step in range(600):
        for i, (length, number, sampling, join, leave, stop) in enumerate(wanted):
            if join == step:
                made[i] = engine.submit(
                    prompt_of(length, i), max_new_tokens=number, sampling=sampling, seed=i, stop=stop
                )
            if leave is not None and join + leave == step and i in made and made[i].finished is None:
                engine.cancel(made[i])
                ends[i] = len(made[i].tokens)
        for event in engine.step():
            i = next(i for i, request in made.items() if request is event.request)
            seen[i] += event.tokens
            if i in ends:
                late.append(i)
        if len(made) == len(wanted) and not engine.busy:
            break
    assert not engine.busy
    assert not late  # nothing comes of a cancelled request
    for i, (length, number, sampling, _, _, stop) in enumerate(wanted):
        want = alone(model("v1"), prompt_of(length, i), number, sampling, i, stop)
        assert made[i].tokens == seen[i]
        if i in ends:
            assert made[i].finished == "cancelled"
            assert seen[i] == want[: ends[i]]
        else:
            assert seen[i] == want
            assert made[i].finished == ("stop" if want[-1] in stop else "length")


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_a_prompt_read_in_pieces_is_the_prompt_read_whole(chunk):
    engine = Engine(model(), slots=2, chunk=chunk)
    request = engine.submit(prompt_of(T, 3), max_new_tokens=4, sampling=GREEDY)
    steps = 0
    while not request.tokens:
        engine.step()
        steps += 1
    assert steps == max(1, -(-(T - 1) // chunk))  # and no piece is larger than asked for
    finish(engine)
    assert request.tokens == alone(model(), prompt_of(T, 3), 4, GREEDY, 0)


def test_others_go_on_while_a_long_prompt_is_read():
    engine = Engine(model(), slots=2, chunk=1)
    first = engine.submit([1], max_new_tokens=8, sampling=GREEDY)
    engine.step()
    engine.submit(prompt_of(T, 1), max_new_tokens=1, sampling=GREEDY)
    before = len(first.tokens)
    engine.step()
    engine.step()
    assert len(first.tokens) == before + 2


def test_the_queue_is_first_come_first_served():
    engine = Engine(model(), slots=1)
    requests = [engine.submit([i], max_new_tokens=2, sampling=GREEDY) for i in range(4)]
    order = [requests.index(event.request) for event in finish(engine)]
    assert order == [0, 0, 1, 1, 2, 2, 3, 3]


def test_cancelling_while_waiting_reading_and_after_the_end():
    engine = Engine(model(), slots=1, chunk=2)
    reading = engine.submit(prompt_of(10, 1), max_new_tokens=3, sampling=GREEDY)
    waiting = engine.submit([1], max_new_tokens=3, sampling=GREEDY)
    other = engine.submit([2, 3], max_new_tokens=3, sampling=GREEDY)
    engine.step()
    engine.cancel(reading)
    engine.cancel(waiting)
    finish(engine)
    assert (reading.finished, waiting.finished, other.finished) == ("cancelled", "cancelled", "length")
    assert reading.tokens == waiting.tokens == []
    assert other.tokens == alone(model(), [2, 3], 3, GREEDY, 0)
    engine.cancel(other)
    assert engine.step() == []
    assert other.finished == "length"


def test_a_stop_id_ends_a_request_and_is_its_last_token():
    want = alone(model(), [4, 5], 10, SAMPLED, 3)
    engine = Engine(model())
    request = engine.submit([4, 5], max_new_tokens=10, sampling=SAMPLED, seed=3, stop=[want[4]])
    finish(engine)
    assert request.tokens == want[: want.index(want[4]) + 1]
    assert request.finished == "stop"


def test_numbers_come_from_the_generator_at_submit():
    generator = torch.Generator().manual_seed(5)
    engine = Engine(model(), slots=1)
    one = engine.submit([1, 2], max_new_tokens=6, sampling=SAMPLED, generator=generator)
    two = engine.submit([1, 2], max_new_tokens=6, sampling=SAMPLED, generator=generator)
    finish(engine)
    generator = torch.Generator().manual_seed(5)
    for request in (one, two):
        decoder = Decoder(model(), [[1, 2]], max_new_tokens=6, sampling=SAMPLED, generators=generator)
        assert request.tokens == [decoder.step()[0] for _ in range(6)]


def test_submitting_from_other_threads():
    engine = Engine(model(), slots=4)
    requests: list[Request] = []

    def client(seed: int) -> None:
        for j in range(5):
            requests.append(engine.submit([seed, j], max_new_tokens=5, sampling=GREEDY))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.busy:
        engine.step()
    assert len(requests) == 15
    for request in requests:
        assert request.tokens == alone(model(), request.ids[:2], 5, GREEDY, 0)


def test_a_model_in_training_mode_is_decoded_without_dropout_and_left_as_it_was():
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, dropout=0.5))
    engine = Engine(gpt)
    request = engine.submit(prompt_of(6, 1), max_new_tokens=T, sampling=GREEDY)
    finish(engine)
    assert gpt.training
    assert request.tokens == alone(gpt.eval(), prompt_of(6, 1), T, GREEDY, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [0, V]}, f"vocabulary must be an integer from 0 to {V - 1}, got {V}"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": [5.0]}, "got 5.0"),
        ({"prompt": [1, math.nan, 2]}, "got nan"),
        ({"prompt": [True]}, "got True"),
        ({"prompt": "ab"}, "got 'a'"),
        ({"max_new_tokens": 0}, f"max_new_tokens must be an integer from 1 to {MOST_TOKENS}, got 0"),
        ({"max_new_tokens": 10**12}, "max_new_tokens"),
        ({"max_new_tokens": 2.0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"seed": 1, "generator": torch.Generator()}, "exclude each other"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_queued(options, message):
    engine = Engine(model())
    options = {"prompt": [1], "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        engine.submit(options.pop("prompt"), **options)
    assert not engine.busy


@pytest.mark.parametrize("options", [{"slots": 0}, {"chunk": 0}])
def test_an_engine_needs_room(options):
    with pytest.raises(ValueError, match="at least 1"):
        Engine(model(), **options)


def test_numbers_of_numpy_are_numbers():
    engine = Engine(model())
    prompt = np.array([3, 1, 4], dtype=np.uint16)
    request = engine.submit(prompt, max_new_tokens=np.int64(5), sampling=SAMPLED, seed=2)
    finish(engine)
    assert request.tokens == alone(model(), [3, 1, 4], 5, SAMPLED, 2)
    assert {type(i) for i in request.ids} == {int}


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 7])
def test_a_step_that_fails_while_choosing_is_done_again(monkeypatch, failing):
    """Nobody's tokens change: neither of those within T nor of those past it, who are chosen for separately."""
    plain, calls = slots.choose, []

    def choose(*arguments):
        calls.append(1)
        if len(calls) == failing:
            raise KeyError
        return plain(*arguments)

    monkeypatch.setattr(slots, "choose", choose)
    engine = Engine(model())
    prompts = [[1, 2], prompt_of(T + 1, 3), [7], prompt_of(T - 3, 4)]
    requests = [engine.submit(prompt, max_new_tokens=6, sampling=SAMPLED, seed=1) for prompt in prompts]
    with pytest.raises(KeyError):
        finish(engine)
    finish(engine)
    assert [request.tokens for request in requests] == [alone(model(), prompt, 6, SAMPLED, 1) for prompt in prompts]


def test_a_model_that_gives_nan_is_refused():
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, dropout=0.0)).eval()
    with torch.no_grad():
        gpt.norm.weight[0] = math.nan
    engine = Engine(gpt)
    engine.submit([1, 2], max_new_tokens=3)
    with pytest.raises(FloatingPointError, match="weights are broken"):
        engine.step()
