"""Decoding token by token, for a batch of prompts of any lengths, with or without a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.request import new_tokens, prompt_ids
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.rng import generator as make_generator

MOST_ROWS = 64
"""Rows that a decoder on CUDA decodes at a time; more wait."""
Generators = torch.Generator | Sequence[torch.Generator] | None


class Decoder:
    """Continues prompts by one token per `step`.

    Up to T tokens a row lives in the KV cache. Past T its window is the last T tokens at positions
    0..T-1, so every key changes with every token and the window is computed anew: cached and
    uncached decoding see the same numbers up to float error, and give the same ids.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Generators = None,
        use_cache: bool = True,
    ) -> None:
        """Raises ValueError for an empty prompt, what is no id of the vocabulary, and max_new_tokens that are no
        integer from 0 to `config.MOST_TOKENS`."""
        self.model = model
        self.max_new_tokens = new_tokens(max_new_tokens, 0)
        self.ids = _ids(prompts, model)
        self.active = list(range(len(prompts)))
        self._sampling = sampling
        self._use_cache = (
            use_cache and getattr(model.forward, "__func__", None) is GPT.forward
        )  # a model of another kind is just called
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # the rows of the cache, in its order
        self._one_token = one_token(model) if self._use_cache else None
        self._uniform = _draw(len(prompts), self.max_new_tokens, generators, sampling)  # (rows, steps)
        self._last: tuple[list[int], torch.Tensor] = ([], torch.empty(0))  # the rows of the last step, their tokens
        self._step = 0

    def finish(self, row: int) -> None:
        """Take a row out; the others are not affected."""
        self.active.remove(row)

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """(row, its next tokens), until no row is active or each has its max_new_tokens."""
        while self.active and self._step < self.max_new_tokens:
            for row, token in self.step().items():
                yield row, [token]

    def close(self, *, keep: bool = True) -> None:
        """Nothing more is wanted."""

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """Append one token to every active row; row -> token."""
        T = self.model.config.T
        inside = [row for row in self.active if self._use_cache and len(self.ids[row]) <= T]
        outside = [row for row in self.active if row not in inside] if len(inside) < len(self.active) else []
        parts = []
        if inside:
            parts.append(self._cached_logits(inside))
        if outside:
            parts.append(self._window_logits(outside))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = inside + outside
        ids = choose(logits, self._sampling, self._numbers(rows) if self._sampling.temperature else self._uniform)
        self._last = (rows, ids)
        chosen = ids.tolist()
        self._step += 1
        for row, token in zip(rows, chosen, strict=True):
            self.ids[row].append(token)
        return dict(zip(rows, chosen, strict=True))

    def _numbers(self, rows: list[int]) -> torch.Tensor:
        """The uniform number of each row for this step."""
        column = self._uniform[:, self._step]
        return column if len(rows) == len(column) and rows == sorted(rows) else column[rows]

    def _cached_logits(self, rows: list[int]) -> torch.Tensor:
        """(len(rows), V) for rows of at most T tokens; all but their last token are in the cache already."""
        model = self.model
        if self._cache is None:  # prefill: nothing is cached yet
            self._cache = KVCache(model.config, len(rows), device=model.device, dtype=model.tok_emb.weight.dtype)
            self._cached = rows
            lengths = [len(self.ids[row]) for row in rows]
            logits = model(self._padded([self.ids[row] for row in rows]), cache=self._cache)
            self._cache.lengths = lengths
            return logits[torch.arange(len(rows)), torch.tensor(lengths) - 1]
        if rows != self._cached:  # some have finished, or have grown past T
            self._cache.select([self._cached.index(row) for row in rows])
            self._cached = rows
        if rows == self._last[0]:
            last = self._last[1]  # still on the device
        else:
            last = torch.tensor([self.ids[row][-1] for row in rows], device=model.device)
        assert self._one_token is not None
        return self._one_token(last, self._cache)

    def _window_logits(self, rows: list[int]) -> torch.Tensor:
        """(len(rows), V) from the last T tokens of each row, without a cache."""
        windows = [self.ids[row][-self.model.config.T :] for row in rows]
        logits = self.model(self._padded(windows))
        return logits[torch.arange(len(rows)), torch.tensor([len(window) - 1 for window in windows])]

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        """One tensor, zeros on the right: attention is causal, so no real token sees the padding."""
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.model.device)


class EngineDecoder:
    """A Decoder on CUDA: its rows are requests of an engine, which decodes ahead of the reader."""

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Generators = None,
    ) -> None:
        """Raises ValueError as Decoder does."""
        ids, number = _ids(prompts, model), new_tokens(max_new_tokens, 0)
        self._engine = Engine(model, slots=min(len(prompts), MOST_ROWS))
        self.active = list(range(len(prompts))) if number else []
        uniform = _draw(len(prompts), number, generators, sampling)
        self._requests = [
            self._engine.add(ids[row], max_new_tokens=number, sampling=sampling, uniform=uniform[row])
            for row in self.active
        ]

    def finish(self, row: int) -> None:
        """Take a row out; the others are not affected."""
        self.active.remove(row)
        self._engine.cancel(self._requests[row])

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """(row, its next tokens), until no row is active."""
        rows = {request: row for row, request in enumerate(self._requests)}
        while self.active:
            for request, tokens, finished in self._engine.step():
                row = rows[request]
                if row in self.active:  # not taken out since
                    yield row, tokens
                    if finished and row in self.active:
                        self.active.remove(row)

    def close(self, *, keep: bool = True) -> None:
        """Nothing more is wanted. `keep` the graphs and their memory for the next decoder of the model."""
        self._engine.close(keep=keep)


def decoder_for(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generators: Generators = None,
    use_cache: bool = True,
) -> Decoder | EngineDecoder:
    """The decoder that is fastest on the model's device. Raises ValueError as Decoder does."""
    if use_cache and prompts and cuda_slots.usable(model):
        return EngineDecoder(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, generators=generators)
    return Decoder(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generators=generators,
        use_cache=use_cache,
    )


def _ids(prompts: Sequence[Sequence[int]], model: GPT) -> list[list[int]]:
    return [prompt_ids(prompt, model.config.V, f"prompt {i}") for i, prompt in enumerate(prompts)]


def _draw(rows: int, steps: int, generators: Generators, sampling: Sampling) -> torch.Tensor:
    """The uniform number of every row and step, drawn beforehand (greedy decoding draws none).

    One generator per row, or one for all: then several rows get streams of their own derived from it.
    """
    if sampling.temperature == 0.0 or rows == 0:
        return torch.zeros(rows, steps, dtype=torch.float64)
    if isinstance(generators, Sequence):
        if len(generators) != rows:
            raise ValueError(f"{len(generators)} generators for {rows} prompts: give one per prompt, or one for all")
        each: Sequence[torch.Generator | None] = generators
    elif rows == 1:
        each = [generators]
    else:
        base = int(torch.randint(2**62, (1,), generator=generators))
        each = [make_generator(base, "row", row) for row in range(rows)]
    return torch.stack([torch.rand(steps, generator=g, dtype=torch.float64) for g in each])
