"""Decode token by token, for a batch of prompts of any lengths, with or without a KV cache.

There are two decode loops. `Decoder` decodes a batch whose rows start together; `Engine` (engine/) adds and removes
requests between steps. `Engine` could do both jobs, but its bookkeeping per step (lock, queues, one sampling group per
setting) costs tens of microseconds, a few percent of a v0 token at batch 1 on a CPU. On CUDA the engine's graphs are
faster than any eager loop, so there `EngineDecoder` runs a batch as requests of an engine. It also does where a prefix
cache or `context_overflow="half"` is requested, which only the engine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.prefix_cache import PrefixCache
from niels_gpt.inference.engine.request import ContextOverflow, check_new_tokens, check_prompt
from niels_gpt.inference.engine.slots import pad_right
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.model.backend import halves
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.rng import generator as make_generator

MAX_ROWS = 64
"""Rows that a decoder on CUDA decodes at a time; the others wait."""
Generators = torch.Generator | Sequence[torch.Generator] | None
"""One generator for all rows, one per row, or None for torch's default generator."""


class Decoder:
    """Continue a batch of prompts by one token per `step`.

    A row of up to T tokens uses the KV cache. A longer row is cropped to its last T tokens at positions 0..T-1, so
    every key changes with every token and the window is recomputed. Cached and uncached decoding see the same logits
    up to float error, and give the same ids.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: Generators = None,
        use_cache: bool = True,
    ) -> None:
        """Raise ValueError for an empty prompt, an id outside the vocabulary, and max_new_tokens outside
        0..`config.MOST_TOKENS`."""
        self.model = model
        self.max_new_tokens = check_new_tokens(max_new_tokens, 0)
        self.ids = _check_prompts(prompts, model)
        self.active = list(range(len(prompts)))
        self._sampling = sampling
        self._use_cache = use_cache and has_kv_cache(model)
        self._cache: KVCache | None = None
        self._cached: list[int] = []  # rows of the batch in the order of the cache
        self._one_token = one_token(model) if self._use_cache else None
        self._uniform = _draw(_row_generators(generator, len(prompts), sampling), self.max_new_tokens, sampling)
        self._seen = [set(ids) if sampling.penalized else set() for ids in self.ids]
        self._last: tuple[list[int], torch.Tensor] = ([], torch.empty(0))  # rows of the last step, their tokens
        self._step = 0

    def finish(self, row: int) -> None:
        """Stop decoding a row; the other rows are not affected."""
        self.active.remove(row)

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (row, its new tokens) until no row is active or each has max_new_tokens."""
        while self.active and self._step < self.max_new_tokens:
            for row, token in self.step().items():
                yield row, [token]

    def close(self, *, keep: bool = True) -> None:
        """Do nothing; see `EngineDecoder.close`."""

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """Append one token to every active row; return row -> token."""
        T = self.model.config.T
        inside = [row for row in self.active if self._use_cache and len(self.ids[row]) <= T]
        outside = [row for row in self.active if row not in inside] if len(inside) < len(self.active) else []
        groups = []
        if inside:
            groups.append(self._cached_logits(inside))
        if outside:
            groups.append(self._window_logits(outside))
        logits = groups[0] if len(groups) == 1 else torch.cat(groups)
        rows = inside + outside
        draws = self._draws(rows) if self._sampling.temperature else self._uniform
        ids = choose(logits, self._sampling, draws, [self._seen[row] for row in rows])
        self._last = (rows, ids)
        chosen = ids.tolist()
        self._step += 1
        for row, token in zip(rows, chosen, strict=True):
            self.ids[row].append(token)
            self._seen[row].add(token)
        return dict(zip(rows, chosen, strict=True))

    def _draws(self, rows: list[int]) -> torch.Tensor:
        """Return the uniform draw of each row for this step."""
        column = self._uniform[:, self._step]
        return column if len(rows) == len(column) and rows == sorted(rows) else column[rows]

    def _cached_logits(self, rows: list[int]) -> torch.Tensor:
        """Return (len(rows), V) for rows of at most T tokens; all but their last token are cached."""
        if self._cache is None:
            return self._prefill(rows)
        if rows != self._cached:  # some rows have finished or have grown past T
            self._cache.select([self._cached.index(row) for row in rows])
            self._cached = rows
        if rows == self._last[0]:
            last = self._last[1]  # still on the device
        else:
            last = torch.tensor([self.ids[row][-1] for row in rows], device=self.model.device)
        assert self._one_token is not None
        return self._one_token(last, self._cache)

    def _prefill(self, rows: list[int]) -> torch.Tensor:
        """Read the prompts into a new cache and return the logits (len(rows), V) after each."""
        model = self.model
        lengths = [len(self.ids[row]) for row in rows]
        capacity = min(model.config.T, max(lengths) + self.max_new_tokens)
        weight = model.tok_emb.weight
        self._cache = KVCache(model.config, len(rows), device=model.device, dtype=weight.dtype, capacity=capacity)
        self._cached = rows
        hidden, logits = halves(model)
        h = hidden(pad_right([self.ids[row] for row in rows], model.device), cache=self._cache)  # (B, n, C)
        self._cache.lengths = lengths
        return logits(h[torch.arange(len(rows)), torch.tensor(lengths) - 1])[:, : model.sampled_ids]

    def _window_logits(self, rows: list[int]) -> torch.Tensor:
        """Return (len(rows), V) from the last T tokens of each row, without a cache."""
        windows = [self.ids[row][-self.model.config.T :] for row in rows]
        logits = self.model(pad_right(windows, self.model.device))
        last = logits[torch.arange(len(rows)), torch.tensor([len(window) - 1 for window in windows])]
        return last[:, : getattr(self.model, "sampled_ids", None)]  # any module with a forward may be decoded


class EngineDecoder:
    """A `Decoder` whose rows are requests of an engine. On CUDA the engine decodes ahead of the reader."""

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: Generators = None,
        context_overflow: ContextOverflow = "slide",
        prefix_cache: PrefixCache | None = None,
        pinned: int = 0,
    ) -> None:
        """Raise ValueError as `Decoder` does. The last three arguments are those of `Engine` and `Engine.submit`."""
        ids, new_tokens = _check_prompts(prompts, model), check_new_tokens(max_new_tokens, 0)
        generators = _row_generators(generator, len(prompts), sampling)
        self._engine = Engine(
            model, slots=min(len(prompts), MAX_ROWS), context_overflow=context_overflow, prefix_cache=prefix_cache
        )
        self.active = list(range(len(prompts))) if new_tokens else []
        self._requests = [
            self._engine.submit(
                ids[row], max_new_tokens=new_tokens, sampling=sampling, generator=generators[row], pinned=pinned
            )
            for row in self.active
        ]

    def finish(self, row: int) -> None:
        """Stop decoding a row; the other rows are not affected."""
        self.active.remove(row)
        self._engine.cancel(self._requests[row])

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (row, its new tokens) until no row is active."""
        rows = {request: row for row, request in enumerate(self._requests)}
        while self.active:
            for event in self._engine.step():
                row, tokens, finished = rows[event.request], event.tokens, event.finished
                if row in self.active:  # the reader may have finished it since
                    yield row, tokens
                    if finished and row in self.active:
                        self.active.remove(row)

    def close(self, *, keep: bool = True) -> None:
        """End all rows. `keep` the captured graphs and their memory for the model's next decoder."""
        self._engine.close(keep=keep)


def has_kv_cache(model: GPT) -> bool:
    """Whether a model can be decoded from a KV cache: not one with its own forward, which sees the window each time."""
    return getattr(model.forward, "__func__", None) is GPT.forward


def decoder_for(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    generator: Generators = None,
    use_cache: bool = True,
    context_overflow: ContextOverflow = "slide",
    prefix_cache: PrefixCache | None = None,
    pinned: int = 0,
) -> Decoder | EngineDecoder:
    """Return the fastest decoder for the model's device. Raises ValueError as `Decoder` does.

    Without a KV cache (`use_cache=False`, or a model with its own forward) the last three arguments have no effect.
    """
    needs_engine = (context_overflow != "slide" or prefix_cache is not None) and has_kv_cache(model)
    if use_cache and prompts and (needs_engine or cuda_slots.usable(model)):
        return EngineDecoder(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            generator=generator,
            context_overflow=context_overflow,
            prefix_cache=prefix_cache,
            pinned=pinned,
        )
    return Decoder(
        model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, generator=generator, use_cache=use_cache
    )


def _check_prompts(prompts: Sequence[Sequence[int]], model: GPT) -> list[list[int]]:
    return [check_prompt(prompt, model.config.V, f"prompt {i}") for i, prompt in enumerate(prompts)]


def _row_generators(generator: Generators, rows: int, sampling: Sampling) -> Sequence[torch.Generator | None]:
    """Return one generator per row. Several rows that share one get streams derived from it; greedy rows need none."""
    if sampling.temperature == 0.0 or rows == 0:
        return [None] * rows
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            raise ValueError(f"got {len(generator)} generators for {rows} prompts: give one per prompt, or one for all")
        return generator
    if rows == 1:
        return [generator]
    base = int(torch.randint(2**62, (1,), generator=generator))
    return [make_generator(base, "row", row) for row in range(rows)]


def _draw(generators: Sequence[torch.Generator | None], steps: int, sampling: Sampling) -> torch.Tensor:
    """Draw the uniform numbers of all rows and steps in advance (rows, steps); greedy decoding draws none."""
    if sampling.temperature == 0.0 or not generators:
        return torch.zeros(len(generators), steps, dtype=torch.float64)
    return torch.stack([torch.rand(steps, generator=g, dtype=torch.float64) for g in generators])
