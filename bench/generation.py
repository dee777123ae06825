"""Greedy text generation with our model and with peers, for the cases generate, generate_cold and pretrained_decode.

On CUDA peers run in bf16; ours runs in fp32, the precision of its weights, through the public functions only.
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

STATIC = "Llama, static cache"
"""Llama of transformers with a cache of fixed size, for which `generate` compiles the forward on CUDA."""
Generate = Callable[[int], object]
"""Continues the prompt by so many tokens, and returns when they are on the host."""


@dataclass(frozen=True)
class Setup:
    """The model, the device and the number of prompts."""

    size: Size
    device: str = "cpu"
    batch: int = 1
    prompt_tokens: int = 0
    """Length of the prompt; 0: by device."""
    new_tokens: int = 0
    """Tokens to generate; 0: by device."""

    @property
    def prompt(self) -> str:
        """On CUDA one token by default, so that 256 new ones fit the context of v0."""
        if self.prompt_tokens:
            return ("hello world, " * self.prompt_tokens)[: self.prompt_tokens]
        return "hello world" if self.device == "cpu" else "\n"

    def new(self, quick: bool) -> int:
        return 10 if quick else self.new_tokens or (200 if self.device == "cpu" else 256)


class Ids:
    """A stand-in tokenizer for random weights: encodes bytes, decodes any of V ids."""

    document_start = ()
    adds_space = False

    def __init__(self, V: int) -> None:
        self.vocab_size = V
        self.token_bytes = [bytes([97 + i % 26]) for i in range(V)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def special_token_ids(self) -> dict[str, int]:
        return {}


def load(name: str, setup: Setup, quick: bool) -> Generate:
    """Return ours or a peer, by name, with its model on the device; nothing is generated yet."""
    import torch

    size = setup.size.scaled(quick)
    torch.manual_seed(0)
    make = models.niels_gpt if name == OURS else models.llama if name == STATIC else models.PEERS[name]
    model = make(size).to(setup.device).eval()
    if setup.device == "cuda" and name != OURS:
        model = model.to(torch.bfloat16)
    builders: dict[str, Callable[[Any, Setup, int], Generate]] = {OURS: _ours, "nano": _nano, "litgpt": _litgpt}
    builders[STATIC] = _static
    generate = builders.get(name, _transformers)(model, setup, setup.new(quick))
    if setup.device == "cuda":
        torch.cuda.synchronize()
    return generate


def _ours(model: Any, setup: Setup, most: int) -> Generate:
    from niels_gpt import generate
    from niels_gpt.inference.generation import generate_batch
    from niels_gpt.inference.sampling import Sampling

    tokenizer: Any = Ids(model.config.V) if model.config.V > 256 else None
    prompts, greedy = [setup.prompt] * setup.batch, Sampling(temperature=0.0)
    if setup.batch == 1:
        return lambda n: generate(model, setup.prompt, max_new_tokens=n, temperature=0.0, tokenizer=tokenizer)
    return lambda n: generate_batch(model, prompts, max_new_tokens=n, sampling=greedy, tokenizer=tokenizer)


def _ids(setup: Setup) -> Any:
    import torch

    return torch.tensor([list(setup.prompt.encode())] * setup.batch, device=setup.device)


def _nano(model: Any, setup: Setup, most: int) -> Generate:
    ids = _ids(setup)
    return lambda n: model.generate(ids, n, temperature=0.0).tolist()


def _static(model: Any, setup: Setup, most: int) -> Generate:
    return _transformers(model, setup, most, cache_implementation="static")


def _transformers(model: Any, setup: Setup, most: int, **more: Any) -> Generate:
    import torch

    ids = _ids(setup)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, "pad_token_id": 0, **more}

    def continue_by(n: int) -> object:
        ids_out = model.generate(ids, min_new_tokens=n, max_new_tokens=n, **options)
        assert ids_out.shape == (setup.batch, len(setup.prompt) + n), ids_out.shape
        return ids_out.tolist()

    return continue_by


def _litgpt(model: Any, setup: Setup, most: int) -> Generate:
    from litgpt.generate.base import generate

    ids = _ids(setup)[0]
    longest = len(setup.prompt) + most
    model.config.block_size = max(model.config.block_size, longest)  # RoPE angles for all positions
    model.max_seq_length = longest
    model.set_kv_cache(batch_size=1, device=ids.device)

    def continue_by(n: int) -> object:
        # litgpt samples if top_p is above 0, even at temperature 0.
        ids_out = generate(model, ids, len(setup.prompt) + n, temperature=0.0, top_p=0.0)
        assert ids_out.shape == (len(setup.prompt) + n,), ids_out.shape
        return ids_out.tolist()

    return continue_by


def warm_work(name: str, setup: Setup, quick: bool) -> Work:
    """Return rounds that generate the same text."""
    generate, new = load(name, setup, quick), setup.new(quick)
    return Work(lambda: generate(new), setup.batch * new)


def cold_work(name: str, setup: Setup, quick: bool) -> Work:
    """Return the first generation of a process: seconds to one token, and to all tokens requested after it."""
    generate, new = load(name, setup, quick), setup.new(quick)

    def run() -> dict[str, float]:
        began = time.perf_counter()
        generate(1)
        first = time.perf_counter() - began
        generate(new)
        return {"s to first": first, "s": time.perf_counter() - began}

    return Work(run, measures=True, warm=False)
