"""200 new tokens from a prompt of 11 bytes, v0, greedy, with a KV cache; alone and 32 at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import models
from bench.case import Case, Contender, Work

PROMPT = "hello world"


def _new(quick: bool) -> int:
    return 10 if quick else 200


def _ours(quick: bool, batch: int) -> Work:
    from niels_gpt import generate
    from niels_gpt.inference.sampling import Sampling
    from niels_gpt.inference.text import generate_batch

    model, n = models.niels_gpt(), _new(quick)
    if batch == 1:
        return Work(lambda: generate(model, PROMPT, max_new_tokens=n, temperature=0.0), n)
    prompts, greedy = [PROMPT] * batch, Sampling(temperature=0.0)
    return Work(lambda: generate_batch(model, prompts, max_new_tokens=n, sampling=greedy), batch * n)


def _transformers(make: Callable[[], Any], quick: bool, batch: int) -> Work:
    import torch

    model, n = make().eval(), _new(quick)
    ids = torch.tensor([list(PROMPT.encode())] * batch)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def run() -> None:
        made = model.generate(ids, min_new_tokens=n, max_new_tokens=n, **options)
        assert made.shape == (batch, len(PROMPT) + n), made.shape

    return Work(run, batch * n)


def _litgpt(quick: bool) -> Work:
    import torch
    from litgpt.generate.base import generate

    model, n = models.litgpt().eval(), _new(quick)
    ids = torch.tensor(list(PROMPT.encode()))
    model.max_seq_length = len(PROMPT) + n
    model.set_kv_cache(batch_size=1)

    def run() -> None:
        made = generate(model, ids, len(PROMPT) + n, temperature=0.0, top_p=0.0)  # with top_p above 0 it samples
        assert made.shape == (len(PROMPT) + n,), made.shape

    return Work(run, n)


def _contenders(batch: int, **options: Any) -> list[Contender]:
    group = f"batch {batch}"
    return [
        Contender(f"niels-gpt, {group}", lambda quick: _ours(quick, batch), "ours", group, **options),
        Contender(f"GPT-2, {group}", lambda quick: _transformers(models.gpt2, quick, batch), group=group),
        Contender(f"Llama, {group}", lambda quick: _transformers(models.llama, quick, batch), group=group),
    ]


# The target speaks of transformers; litgpt stands beside it, in a group of its own.
LITGPT = Contender("litgpt, batch 1", _litgpt, group="litgpt")
CASE = Case("generate", "tokens/s", (*_contenders(1, target=3.0), LITGPT, *_contenders(32)))
