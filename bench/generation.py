"""Text from a model, ours and those of peers, greedy: what the cases generate and generate_cold have in common.

On CUDA peers compute in bf16, ours in the fp32 of its weights, through the package's public functions alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import models
from bench.case import Work
from bench.models import Size
from bench.training import OURS

Speaker = Callable[[int], object]
"""Continues the prompt by so many tokens; they are there when it returns."""


@dataclass(frozen=True)
class Talk:
    """What is to be continued, by which model, where."""

    size: Size
    device: str = "cpu"
    batch: int = 1

    @property
    def prompt(self) -> str:
        """On CUDA one token, so that 256 new ones fit the window of v0."""
        return "hello world" if self.device == "cpu" else "\n"

    def new(self, quick: bool) -> int:
        return 10 if quick else 200 if self.device == "cpu" else 256


class Ids:
    """A tokenizer for models with random weights: bytes in, V ids out."""

    def __init__(self, V: int) -> None:
        self.vocab_size = V
        self.token_bytes = [bytes([97 + i % 26]) for i in range(V)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def special_token_ids(self) -> dict[str, int]:
        return {}


def load(name: str, talk: Talk, quick: bool) -> Speaker:
    """Ours or a peer, by its name, with its model on the device; nothing is computed yet."""
    import torch

    size = talk.size.scaled(quick)
    torch.manual_seed(0)
    make = models.niels_gpt if name == OURS else models.PEERS[name]
    model = make(size).to(talk.device).eval()
    if talk.device == "cuda" and name != OURS:
        model = model.to(torch.bfloat16)
    makers: dict[str, Callable[[Any, Talk, int], Speaker]] = {OURS: _ours, "nano": _nano, "litgpt": _litgpt}
    speaker = makers.get(name, _transformers)(model, talk, talk.new(quick))
    if talk.device == "cuda":
        torch.cuda.synchronize()
    return speaker


def _ours(model: Any, talk: Talk, most: int) -> Speaker:
    from niels_gpt import generate
    from niels_gpt.inference.generation import generate_batch
    from niels_gpt.inference.sampling import Sampling

    tokenizer: Any = Ids(model.config.V) if model.config.V > 256 else None
    prompts, greedy = [talk.prompt] * talk.batch, Sampling(temperature=0.0)
    if talk.batch == 1:
        return lambda n: generate(model, talk.prompt, max_new_tokens=n, temperature=0.0, tokenizer=tokenizer)
    return lambda n: generate_batch(model, prompts, max_new_tokens=n, sampling=greedy, tokenizer=tokenizer)


def _ids(talk: Talk) -> Any:
    import torch

    return torch.tensor([list(talk.prompt.encode())] * talk.batch, device=talk.device)


def _nano(model: Any, talk: Talk, most: int) -> Speaker:
    ids = _ids(talk)
    return lambda n: model.generate(ids, n, temperature=0.0).tolist()


def _transformers(model: Any, talk: Talk, most: int) -> Speaker:
    import torch

    ids = _ids(talk)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def speak(n: int) -> object:
        made = model.generate(ids, min_new_tokens=n, max_new_tokens=n, **options)
        assert made.shape == (talk.batch, len(talk.prompt) + n), made.shape
        return made.tolist()

    return speak


def _litgpt(model: Any, talk: Talk, most: int) -> Speaker:
    from litgpt.generate.base import generate

    ids = _ids(talk)[0]
    whole = len(talk.prompt) + most
    model.config.block_size = max(model.config.block_size, whole)  # its angles go as far as they are asked to
    model.max_seq_length = whole
    model.set_kv_cache(batch_size=1, device=ids.device)

    def speak(n: int) -> object:
        made = generate(model, ids, len(talk.prompt) + n, temperature=0.0, top_p=0.0)  # with top_p above 0 it samples
        assert made.shape == (len(talk.prompt) + n,), made.shape
        return made.tolist()

    return speak


def warm_work(name: str, talk: Talk, quick: bool) -> Work:
    """Rounds of the same text again."""
    speak, new = load(name, talk, quick), talk.new(quick)
    return Work(lambda: speak(new), talk.batch * new)


def cold_work(name: str, talk: Talk, quick: bool) -> Work:
    """The first round of a process: seconds to one token, and until all (asked for after it) are there too."""
    speak, new = load(name, talk, quick), talk.new(quick)

    def run() -> dict[str, float]:
        began = time.perf_counter()
        speak(1)
        first = time.perf_counter() - began
        speak(new)
        return {"s to first": first, "s": time.perf_counter() - began}

    return Work(run, measures=True, warm=False)
