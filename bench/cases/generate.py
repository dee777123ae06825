"""Greedy decoding with a KV cache: 200 new tokens from a prompt of 11 bytes, alone and 32 at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.case import Case, Contender, Work
from bench.cases import peers

PROMPT = "hello world"


def _new_tokens(quick: bool) -> int:
    return 10 if quick else 200


def _ours(quick: bool, batch: int) -> Work:
    from niels_gpt import generate
    from niels_gpt.inference.sampling import Sampling
    from niels_gpt.inference.text import generate_batch

    model, n = peers.niels_gpt(), _new_tokens(quick)

    def run() -> None:
        if batch == 1:
            generate(model, PROMPT, max_new_tokens=n, temperature=0.0)
        else:
            generate_batch(model, [PROMPT] * batch, max_new_tokens=n, sampling=Sampling(temperature=0.0))

    return Work(run, amount=batch * n)


def _transformers(make: Callable[[], Any], quick: bool, batch: int) -> Work:
    import torch

    model, n = make().eval(), _new_tokens(quick)
    ids = torch.tensor([list(PROMPT.encode())] * batch)
    mask = torch.ones_like(ids)

    def run() -> None:
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            min_new_tokens=n,
            max_new_tokens=n,
            pad_token_id=0,
        )
        assert made.shape == (batch, len(PROMPT) + n), made.shape

    return Work(run, amount=batch * n)


def _litgpt(quick: bool) -> Work:
    import torch
    from litgpt.generate.base import generate

    model, n = peers.litgpt().eval(), _new_tokens(quick)
    ids = torch.tensor(list(PROMPT.encode()))
    model.max_seq_length = len(PROMPT) + n
    model.set_kv_cache(batch_size=1)

    def run() -> None:
        # top_p=0 because litgpt still samples at temperature 0 while top_p is above 0.
        made = generate(model, ids, len(PROMPT) + n, temperature=0.0, top_p=0.0)
        assert made.shape == (len(PROMPT) + n,), made.shape

    return Work(run, amount=n)


def _contenders(batch: int, at_least: float | None) -> list[Contender]:
    group = f"batch {batch}"

    def peer(name: str, make: Callable[[], Any]) -> Contender:
        build = lambda quick: _transformers(make, quick, batch)  # noqa: E731
        return Contender(f"transformers {name}, {group}", build, group=group, needs="transformers")

    ours = Contender(f"niels-gpt, {group}", lambda quick: _ours(quick, batch), "ours", group, at_least=at_least)
    return [ours, peer("GPT-2", peers.gpt2), peer("Llama", peers.llama)]


CASE = Case(
    "generate",
    "200 tokens from an 11-byte prompt, greedy, v0",
    "tokens/s",
    (
        *_contenders(1, at_least=3.0),
        Contender("litgpt, batch 1", _litgpt, group="batch 1", needs="litgpt"),
        *_contenders(32, at_least=None),
    ),
)
