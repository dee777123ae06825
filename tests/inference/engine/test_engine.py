"""Requests in an engine: each gets the tokens it would get alone, whichever requests join and leave."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine import slots
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.sampling import Sampling
from tests.inference.engine import GREEDY, SAMPLED, T, V, alone, finish, model, prompt_of
from tests.inference.models import seeded


@pytest.mark.parametrize(("kind", "sampling"), [("v0", SAMPLED), ("v1", GREEDY), ("learned", SAMPLED)])
def test_tokens_across_the_end_of_the_window(kind, sampling):
    engine = Engine(model(kind), slots=3)
    lengths = [1, 2, 5, T - 1, T, T + 1, 2 * T]
    # More requests than slots: some wait.
    requests = [engine.submit(prompt_of(n, n), max_new_tokens=9, sampling=sampling, seed=n) for n in lengths]
    events = finish(engine)
    for n, request in zip(lengths, requests, strict=True):
        want = alone(model(kind), prompt_of(n, n), 9, sampling, n)
        assert request.tokens == want, n
        assert request.finished == "length"
        mine = [event for event in events if event.request is request]
        assert [token for event in mine for token in event.tokens] == want
        assert [event.finished for event in mine] == [None] * 8 + ["length"]  # one token per step on a CPU


def some_requests(most: int, length: int, number: int, steps: int) -> st.SearchStrategy:
    """Lists of (prompt length, new tokens, sampling, step at which it joins, is cancelled after, stop ids)."""
    one = st.tuples(
        st.integers(1, length),
        st.integers(1, number),
        st.sampled_from([GREEDY, SAMPLED, Sampling(0.8, None, None, 0.1)]),
        st.integers(0, steps),
        st.one_of(st.none(), st.integers(0, steps)),
        st.frozensets(st.integers(0, V - 1), max_size=3),
    )
    return st.lists(one, min_size=1, max_size=most)


def check_requests(gpt: GPT, engine: Engine, wanted: list[tuple]) -> None:
    """Let the requests join and leave; each has the tokens and events it would have alone."""
    made: dict[int, Request] = {}
    ends: dict[int, int] = {}
    seen: dict[int, list[int]] = {i: [] for i in range(len(wanted))}
    for step in range(600):
        for i, (length, number, sampling, join, leave, stop) in enumerate(wanted):
            options = {"max_new_tokens": number, "sampling": sampling, "seed": i, "stop": stop}
            if join == step:
                made[i] = engine.submit(prompt_of(length, i), **options)
            if leave is not None and join + leave == step and made[i].finished is None:
                engine.cancel(made[i])
                ends[i] = made[i].received
        for event in engine.step():
            i = next(i for i, request in made.items() if request is event.request)
            assert i not in ends  # a cancelled request has no events
            seen[i] += event.tokens
        if len(made) == len(wanted) and not engine.busy:
            break
    assert not engine.busy
    for i, (length, number, sampling, _, _, stop) in enumerate(wanted):
        want = alone(gpt, prompt_of(length, i), number, sampling, i, stop)
        assert made[i].tokens == seen[i] == want[: ends.get(i, number)]
        assert made[i].finished == ("cancelled" if i in ends else "stop" if want[-1] in stop else "length")


@settings(max_examples=15)
@given(some_requests(7, 2 * T, 16, 12), st.integers(1, 4), st.integers(1, 30))
def test_requests_join_and_leave_at_random(wanted, slots, chunk):
    check_requests(model("v1"), Engine(model("v1"), slots=slots, chunk=chunk), wanted)


@pytest.mark.parametrize("chunk", [1, T - 2, T - 1, 100])
def test_prompt_read_in_chunks(chunk):
    engine = Engine(model(), slots=2, chunk=chunk)
    request = engine.submit(prompt_of(T, 3), max_new_tokens=4, sampling=GREEDY)
    steps = 0
    while not request.tokens:
        engine.step()
        steps += 1
    assert steps == max(1, -(-(T - 1) // chunk))  # and no chunk is larger than requested
    finish(engine)
    assert request.tokens == alone(model(), prompt_of(T, 3), 4, GREEDY, 0)


def test_others_are_decoded_while_a_long_prompt_is_read():
    engine = Engine(model(), slots=2, chunk=1)
    first = engine.submit([1], max_new_tokens=8, sampling=GREEDY)
    engine.step()
    engine.submit(prompt_of(T, 1), max_new_tokens=1, sampling=GREEDY)
    before = len(first.tokens)
    engine.step()
    engine.step()
    assert len(first.tokens) == before + 2


def test_waiting_requests_are_served_in_order():
    engine = Engine(model(), slots=1)
    requests = [engine.submit([i], max_new_tokens=2, sampling=GREEDY) for i in range(4)]
    order = [requests.index(event.request) for event in finish(engine)]
    assert order == [0, 0, 1, 1, 2, 2, 3, 3]


def test_cancel_while_waiting_reading_and_finished():
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


def test_draws_come_from_the_generator_at_submit():
    generator = seeded(5)
    engine = Engine(model(), slots=1)
    one = engine.submit([1, 2], max_new_tokens=6, sampling=SAMPLED, generator=generator)
    two = engine.submit([1, 2], max_new_tokens=6, sampling=SAMPLED, generator=generator)
    finish(engine)
    generator = seeded(5)
    for request in (one, two):
        decoder = Decoder(model(), [[1, 2]], max_new_tokens=6, sampling=SAMPLED, generator=generator)
        assert request.tokens == [decoder.step()[0] for _ in range(6)]


def test_submit_from_other_threads():
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


def test_model_in_training_mode_is_decoded_without_dropout():
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
        ({"prompt": [0, V]}, f"{V - 1}.*{V}"),
        ({"max_new_tokens": 0}, "max_new_tokens.*1.*0"),
        ({"seed": 1, "generator": torch.Generator()}, "generator.*seed"),
    ],
)
def test_invalid_requests_are_not_queued(options, message):
    engine = Engine(model())
    options = {"prompt": [1], "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        engine.submit(options.pop("prompt"), **options)
    assert not engine.busy


def test_limits_of_slots_and_chunk():
    for options in ({"slots": 0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=r"slots.*chunk.*1.*0"):
            Engine(model(), **options)
    engine = Engine(model(), slots=1, chunk=1)
    assert (engine._chunk, engine._num_slots) == (1, 1)
    assert Engine(model())._chunk == slots.PlainSlots.chunk


class Reads(slots.PlainSlots):
    """Plain slots that record what they read."""

    seen: list[tuple[int, int]]

    def read(self, requests, number):
        self.seen.append((len(requests), number))
        super().read(requests, number)


@pytest.mark.parametrize(
    ("chunk", "lengths", "expected"),
    [
        (20, [5, 6, 3, 2], [(4, 5)]),  # 4 x 5 tokens fill the chunk
        (19, [5, 6, 3, 2], [(3, 5), (1, 1)]),  # 4 x 5 do not fit
        (11, [5, 7, 3], [(1, 4), (1, 6), (1, 2)]),  # 2 x 6 do not fit, 2 x 6 again
        (12, [5, 7, 3], [(2, 6), (1, 2)]),
        (6, [5, T, 1, 3], [(1, 4), (1, 6), (1, 5), (1, 2)]),  # a long prompt is read alone, in chunks
        (100, [5, 2 * T, 3], [(1, 4), (1, 2)]),  # one past T is not read at all, and ends the group
    ],
)
def test_short_prompts_are_read_together_within_the_chunk(monkeypatch, chunk, lengths, expected):
    monkeypatch.setattr(Reads, "seen", [], raising=False)
    monkeypatch.setattr("niels_gpt.inference.engine.engine.PlainSlots", Reads)
    engine = Engine(model(), slots=len(lengths), chunk=chunk)
    requests = [engine.submit(prompt_of(n, n), max_new_tokens=2, sampling=GREEDY) for n in lengths]
    finish(engine)
    assert Reads.seen == expected
    for n, request in zip(lengths, requests, strict=True):
        assert request.tokens == alone(model(), prompt_of(n, n), 2, GREEDY, 0)


def test_close_cancels_all_requests():
    engine = Engine(model(), slots=1)
    requests = [engine.submit([1], max_new_tokens=50, sampling=GREEDY) for _ in range(2)]
    engine.step()
    assert engine.busy
    engine.close()
    assert not engine.busy
    assert [request.finished for request in requests] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("failing", [1, 2, 7])
def test_a_step_that_fails_is_repeated(monkeypatch, failing):
    """Tokens do not change, neither within T nor past it, where they are chosen separately."""
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


def test_nan_logits_raise():
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, dropout=0.0)).eval()
    with torch.no_grad():
        gpt.norm.weight[0] = math.nan
    engine = Engine(gpt)
    engine.submit([1, 2], max_new_tokens=3)
    with pytest.raises(FloatingPointError, match="nan"):
        engine.step()
