"""`niels-gpt serve` with the v0 model: tokens/s of 1 and 32 streams, and the time to the first token.

The peers are a plain server (FastAPI, and `generate` of a transformers Llama of the same shape in a thread per request)
and llama-cpp-python's server with the same weights, exported as GGUF in f32. The latter computes one request at a time,
so 32 streams wait for each other there; it runs twice, with its default of half the cores and with all of them, since
either can be faster. A stream continues 11 bytes by 200 tokens. The client runs on the same cores. For the first token,
a bare decode of the same prompt by one token in the same process is subtracted. `serve_turns`: the first token of turn
10 of a conversation beside turn 2, with questions of 20 bytes. On CUDA (`serve_v1`), 64 streams of the v1 model, of 800
tokens each, are compared with its engine, without a server. (Streams of 200 tokens last 0.1 s there, as long as it
takes to accept 64 requests.)
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

from bench import serving
from bench.case import Case, Contender, Work
from bench.models import V0, V1, niels_gpt
from bench.training import OURS

STREAMS = 32
TURNS = 10
TURNS_CONTEXT = 1024
"""Bytes; ten turns fit in."""
STREAMS_CUDA = 64
PLAIN = "transformers + FastAPI"
LLAMA_CPP = "llama-cpp-python"
LLAMA_CPP_ALL = "llama-cpp-python (all cores)"
PACKAGES = {PLAIN: "transformers", LLAMA_CPP: "llama_cpp", LLAMA_CPP_ALL: "llama_cpp"}
"""Peer -> the package it needs."""


def _tokens(quick: bool) -> int:
    return 10 if quick else 200


def _tokens_v1(quick: bool) -> int:
    return 10 if quick else 800


def _start(name: str, quick: bool) -> serving.Address:
    size = V0.scaled(quick)
    if name == OURS:
        return serving.start_ours(size, "cpu", STREAMS)
    if name == PLAIN:
        return serving.start_transformers(size)
    return serving.start_llama_cpp(size, all_cores=name == LLAMA_CPP_ALL)


def _streams(name: str, number: int, quick: bool) -> Work:
    address, tokens = _start(name, quick), _tokens(quick)
    return Work(lambda: serving.read_streams(address, number, tokens), amount=number * tokens)


def _first_token(name: str, quick: bool) -> Work:
    address = _start(name, quick)
    return Work(lambda: serving.read_streams(address, 1, 1))


def _turns(quick: bool) -> Work:
    address = serving.start_ours(dataclasses.replace(V0.scaled(quick), T=TURNS_CONTEXT), "cpu", 1)
    conversations = itertools.count()

    def run() -> dict[str, float]:
        number = next(conversations)  # in every question: nothing of another conversation is in the prefix cache
        seconds = serving.converse(address, [f"{number:03} Tell me more. {turn:02}" for turn in range(TURNS)], 8)
        return {"seconds": seconds[-1], "x turn 2": seconds[-1] / seconds[1]}

    return Work(run, measures=True)


def _bare_decode(quick: bool) -> Work:
    import torch

    from niels_gpt.inference.generation import generate

    torch.manual_seed(0)
    model = niels_gpt(V0.scaled(quick)).eval()
    return Work(lambda: generate(model, serving.PROMPT, max_new_tokens=1, temperature=0.0))


def _streams_v1(device: str, quick: bool) -> Work:
    address, tokens = serving.start_ours(V1.scaled(quick), device, STREAMS_CUDA), _tokens_v1(quick)
    return Work(lambda: serving.read_streams(address, STREAMS_CUDA, tokens), amount=STREAMS_CUDA * tokens)


def _engine_v1(device: str, quick: bool) -> Work:
    import torch

    from niels_gpt.inference.engine.engine import Engine
    from niels_gpt.inference.sampling import Sampling

    torch.manual_seed(0)
    model, tokens = niels_gpt(V1.scaled(quick)).to(device).eval(), _tokens_v1(quick)
    engine = Engine(model, slots=STREAMS_CUDA)
    engine.wait_until_ready()

    def run() -> None:
        for _ in range(STREAMS_CUDA):
            engine.submit(list(range(1, 9)), max_new_tokens=tokens, sampling=Sampling(temperature=0.0))
        while engine.busy:
            engine.step()

    return Work(run, amount=STREAMS_CUDA * tokens)


def _contender(name: str, number: int) -> Contender:
    label = f"{name}, {number} stream{'s' if number > 1 else ''}"
    ours = name == OURS
    return Contender(
        label,
        partial(_streams, name, number),
        "ours" if ours else "peer",
        label.split(", ")[1],
        target=1.0 if ours else None,
        alone=f"{OURS}, 1 stream" if ours and number > 1 else None,
        goals={"x alone": "≥ 6"} if ours and number > 1 else {},
        package=PACKAGES.get(name, ""),
    )


def _case_v1(device: str) -> Case:
    engine = f"engine, {STREAMS_CUDA} requests"
    streams = Contender(
        f"{OURS}, {STREAMS_CUDA} streams",
        partial(_streams_v1, device),
        "ours",
        alone=engine,
        goals={"x alone": "≥ 0.6"} if device == "cuda" else {},
    )
    return Case("serve_v1", "tokens/s", (Contender(engine, partial(_engine_v1, device), "baseline"), streams), device)


CASES = (
    Case(
        "serve",
        "tokens/s",
        tuple(_contender(name, number) for number in (1, STREAMS) for name in (OURS, *PACKAGES)),
    ),
    Case(
        "serve_first_token",
        "ms",
        (
            Contender("bare decode", _bare_decode, "baseline"),
            Contender(f"{OURS}, first token", partial(_first_token, OURS), "ours", minus="bare decode", target=50.0),
        ),
    ),
    Case(
        "serve_turns",
        "ms",
        (Contender(f"{OURS}, first token of turn {TURNS}", _turns, "ours", goals={"x turn 2": "≤ 1.3"}),),
    ),
    _case_v1("cpu"),
    _case_v1("cuda"),
)
