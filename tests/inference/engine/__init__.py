"""Helpers for the tests of the engine: a small model, prompts, and the tokens of a request alone."""

from __future__ import annotations

import functools

import torch

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.sampling import Sampling
from tests.inference.models import seeded

GREEDY = Sampling(0.0, None)
SAMPLED = Sampling(1.3, 7, 0.9)
V, T = 30, 12
KINDS = {"v0": {}, "v1": {"norm": "rmsnorm", "mlp": "swiglu", "d_ff": 48}, "learned": {"positions": "learned"}}


@functools.cache
def model(kind: str = "v0") -> GPT:
    """Return a small model whose weights are large enough that positions and context matter."""
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, dropout=0.0, **KINDS[kind])).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            if p.dim() > 1:
                p.mul_(8)
    return gpt


def alone(gpt: GPT, prompt: list[int], number: int, sampling: Sampling, seed: int, stop: frozenset[int] = frozenset()):
    """Return the tokens of a decoder without a cache, cut after the first stop id."""
    options = {"max_new_tokens": number, "sampling": sampling, "use_cache": False}
    decoder = Decoder(gpt, [prompt], **options, generator=seeded(seed))
    tokens = []
    for _ in range(number):
        tokens.append(decoder.step()[0])
        if tokens[-1] in stop:
            break
    return tokens


def finish(engine: Engine, limit: int = 500) -> list:
    """Return all events until the engine is idle."""
    events = []
    for _ in range(limit):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("the engine does not finish")


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(V, (length,), generator=seeded(seed)).tolist()
