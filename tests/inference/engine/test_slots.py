"""Plain slots driven by hand: reading in chunks, rows without gaps, tokens of mixed sampling."""

from __future__ import annotations

import pytest
import torch

from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.engine.slots import PlainSlots, ReadyTokens, next_prompt_tokens, pad_right
from niels_gpt.inference.sampling import Sampling
from tests.inference.engine import GREEDY, SAMPLED, T, alone, model, prompt_of


@pytest.fixture(autouse=True)
def inference_mode():
    """As in `Engine.step`."""
    with torch.inference_mode():
        yield


def request_of(length: int, slot: int, sampling: Sampling = GREEDY, number: int = 8) -> Request:
    draws = torch.rand(number, generator=torch.Generator().manual_seed(slot), dtype=torch.float64)
    request = Request(prompt_of(length, slot), length, number, sampling, frozenset(), draws)
    request.slot = slot
    return request


def read_all(slots: PlainSlots, request: Request, chunk: int = 100) -> None:
    while request.read < len(request.ids) - 1:
        slots.read([request], chunk)
        request.read = min(request.read + chunk, len(request.ids) - 1)
    slots.start(request)


def decode(slots: PlainSlots) -> dict[int, int]:
    """Decode one token of each row; return slot -> token."""
    pending = slots.decode()
    assert pending is not None and pending.counts == [1] * len(pending.requests)
    result = {}
    for request, (token,) in zip(pending.requests, pending.tokens(), strict=True):
        request.ids.append(token)
        request.launched += 1
        result[request.slot] = token
    return result


def test_padding_and_unread_tokens():
    padded = pad_right([[1, 2, 3], [4], []], torch.device("cpu"))
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    first, second = request_of(5, 0), request_of(3, 1)
    first.read = 2
    assert next_prompt_tokens([first, second], 1) == [first.ids[2:3], second.ids[:1]]
    assert next_prompt_tokens([first, second], 9) == [first.ids[2:4], second.ids[:2]]  # all but the last
    ready = ReadyTokens([first, second], [7, 8])
    assert (ready.counts, ready.tokens()) == ([1, 1], [[7], [8]])


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_rows_stay_without_gaps_when_some_are_dropped(chunk):
    """Requests of different lengths, one with nothing to read; the first and the last are dropped in between."""
    slots, requests = PlainSlots(model(), 4), [request_of(n, i) for i, n in enumerate((4, 1, 7, 2))]
    assert slots.decode() is None
    for request in requests:
        read_all(slots, request, chunk)
    decode(slots)
    slots.drop(requests[0])
    assert sorted(decode(slots)) == [1, 2, 3]
    slots.drop(requests[2])
    slots.drop(requests[2])  # a second time has no effect
    for _ in range(2):
        assert sorted(decode(slots)) == [1, 3]
    for request, steps in zip(requests, (1, 4, 2, 4), strict=True):
        assert request.tokens == alone(model(), prompt_of(request.prompt_length, request.slot), steps, GREEDY, 0)
    slots.release(keep=True)
    assert slots.decode() is None


def test_several_prompts_are_read_together():
    slots, requests = PlainSlots(model(), 3), [request_of(n, i) for i, n in enumerate((3, 6, 2))]
    slots.read(requests, 5)
    for request in reversed(requests):
        slots.start(request)
    decode(slots)
    for request in requests:
        assert request.tokens == alone(model(), prompt_of(request.prompt_length, request.slot), 1, GREEDY, 0)


def test_requests_of_different_sampling_use_their_own_draws():
    slots = PlainSlots(model(), 4)
    samplings = [GREEDY, SAMPLED, Sampling(0.8, None, None, 0.1), SAMPLED]
    requests = [request_of(3, i, sampling) for i, sampling in enumerate(samplings)]
    for request in requests:
        read_all(slots, request)
    for _ in range(4):
        decode(slots)
    for request, sampling in zip(requests, samplings, strict=True):
        expected = alone(model(), prompt_of(3, request.slot), 8, sampling, request.slot)
        assert request.tokens == expected[:4]


def test_window_of_the_last_T_tokens():
    slots, requests = PlainSlots(model(), 2), [request_of(T + 1, 0), request_of(2 * T, 1, SAMPLED)]
    for request in requests:
        slots.start(request)
    assert slots.decode() is None  # past T there is nothing in the cache
    tokens = slots.window(requests).tokens()
    for request, token in zip(requests, tokens, strict=True):
        length = request.prompt_length
        assert token == alone(model(), prompt_of(length, request.slot), 8, request.sampling, request.slot)[:1]


def test_a_request_of_T_tokens_is_decoded_from_the_cache():
    slots, request = PlainSlots(model(), 1), request_of(T, 0)
    read_all(slots, request)
    assert list(decode(slots).values()) == alone(model(), prompt_of(T, 0), 1, GREEDY, 0)


def test_limits():
    assert (PlainSlots.max_pending, PlainSlots.chunk) == (0, 512)
