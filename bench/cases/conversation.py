"""A long conversation: the first token of turn 10 beside that of turn 2, and tokens past T beside those inside.

Every turn adds the same number of tokens, and ten turns fill the context. Goals: with the prefix cache turn 10 takes at
most 1.3 times as long as turn 2; with context_overflow="half" a token past T at most 1.3 times as long as one inside.
"""

from __future__ import annotations

import time
from typing import Any

from bench.case import Case, Contender, Work
from bench.models import V0, V1, Size, our_config

TURNS = 10


def _model(size: Size, device: str) -> Any:
    import torch

    from niels_gpt import GPT

    torch.manual_seed(0)
    return GPT(our_config(size)).to(device).eval()


def _turns(size: Size, device: str, prefixes: bool, quick: bool) -> Work:
    """One conversation per round; `seconds` are those of the first token of turn 10."""
    import torch

    from niels_gpt.inference.engine.engine import Engine

    size = size.scaled(quick)
    model, T = _model(size, device), size.T
    new, answer = 4 * T // (5 * TURNS), T // (5 * TURNS)
    text = torch.randint(size.V, (TURNS * new,), generator=torch.Generator().manual_seed(0)).tolist()

    def run() -> dict[str, float]:
        engine, ids, seconds = Engine(model, slots=1, prefix_tokens=T if prefixes else 0), [], []
        if device == "cuda":
            engine.wait_until_ready()
        for turn in range(TURNS):
            ids = [*ids, *text[turn * new : (turn + 1) * new]]
            began = time.perf_counter()
            request = engine.submit(ids, max_new_tokens=answer, seed=turn)
            while not request.received:
                engine.step()
            seconds.append(time.perf_counter() - began)
            while engine.busy:
                engine.step()
            ids = request.ids
        engine.close()
        return {"seconds": seconds[-1], "x turn 2": seconds[-1] / seconds[1]}

    return Work(run, measures=True)


def _overflow(size: Size, device: str, overflow: Any, quick: bool) -> Work:
    """Tokens inside T, then half as many past it; `seconds` are those of one token past T."""
    from niels_gpt.inference.engine.engine import Engine

    size = size.scaled(quick)
    model, T = _model(size, device), size.T
    past = T // 2 if overflow == "half" else 8

    def run() -> dict[str, float]:
        engine = Engine(model, slots=1, context_overflow=overflow)
        if device == "cuda":
            engine.wait_until_ready()
        request = engine.submit([1], max_new_tokens=T - 1 + past, seed=0)
        times = []
        for end in (T, T - 1 + past):
            began, before = time.perf_counter(), request.received
            while engine.busy and request.received < end:
                engine.step()
            times.append((time.perf_counter() - began) / (request.received - before))
        engine.close()
        return {"seconds": times[1], "x inside": times[1] / times[0]}

    return Work(run, measures=True)


def _case(name: str, size: Size, device: str) -> Case:
    def turns(quick: bool) -> Work:
        return _turns(size, device, True, quick)

    def turns_again(quick: bool) -> Work:
        return _turns(size, device, False, quick)

    def half(quick: bool) -> Work:
        return _overflow(size, device, "half", quick)

    def slide(quick: bool) -> Work:
        return _overflow(size, device, "slide", quick)

    contenders = (
        Contender("turn 10, prefix cache", turns, "ours", goals={"x turn 2": "≤ 1.3"}),
        Contender("turn 10, read again", turns_again, "baseline"),
        Contender("token past T, half", half, "ours", goals={"x inside": "≤ 1.3"}),
        Contender("token past T, slide", slide, "baseline"),
    )
    return Case(name, "ms", contenders, device)


CASES = tuple(
    _case(name, size, device)
    for name, size in (("conversation", V0), ("conversation_v1", V1))
    for device in ("cpu", "cuda")
)
