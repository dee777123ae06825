"""The slots of an engine: where requests live while they are decoded. This implementation runs on any device.

`cuda_slots.py` does the same in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.logprobs import TokenLogprobs, token_logprobs
from niels_gpt.inference.sampling import Sampling, adjust, choose
from niels_gpt.model.backend import halves
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache


class PendingTokens(Protocol):
    """Tokens that were launched and may not have been computed yet."""

    requests: list[Request]
    counts: list[int]
    """New tokens per request: at least one, none after its end, and at most one beyond T."""
    logprobs: dict[Request, list[TokenLogprobs]]
    """One per token, for the requests that asked for them."""

    def tokens(self) -> list[list[int]]:
        """Wait for the tokens and return those of each request."""


class Slots(Protocol):
    """Storage for a fixed number of requests: each is read, then started, then decoded until it is dropped."""

    max_pending: int
    """Launches that may be pending before the engine waits for the first."""
    chunk: int
    """Default limit on the prompt tokens that are read at once."""
    exact: bool
    """Whether keys and values of decoded tokens are, up to float error, those that reading the tokens would give."""

    def load(self, request: Request, parts: Sequence[torch.Tensor]) -> None:
        """Use the keys and values (L, 2, G, n, D) of the first tokens of a new request instead of reading them."""

    def read(self, requests: Sequence[Request], number: int) -> None:
        """Read the next `number` tokens of one request, or all unread tokens of several new requests.

        New: nothing has been read yet but what was loaded.
        """

    def keys_and_values(self, request: Request, start: int, end: int) -> torch.Tensor:
        """Return a copy (L, 2, G, end - start, D) of the keys and values of a request that has started."""

    def start(self, request: Request) -> None:
        """Start decoding a request. All but its last token have been read; one longer than T needs no reading."""

    def drop(self, request: Request) -> None:
        """Remove a request."""

    def decode(self) -> PendingTokens | None:
        """Launch one or more tokens for all started requests within T; None if there are none."""

    def window(self, requests: list[Request]) -> PendingTokens | None:
        """Launch one token for requests past T, from their last T tokens.

        None: tokens of these requests are still pending; call again when they have been received.
        """

    def release(self, *, keep: bool) -> None:
        """End the use of these slots. `keep` what the model's next engine can use."""


class ReadyTokens:
    """`PendingTokens` that are already computed, one per request."""

    def __init__(self, requests: list[Request], tokens: list[int]) -> None:
        self.requests = requests
        self.counts = [1] * len(requests)
        self.logprobs: dict[Request, list[TokenLogprobs]] = {}
        self._tokens = tokens

    def tokens(self) -> list[list[int]]:
        return [[token] for token in self._tokens]


class PlainSlots:
    """Slots in one KV buffer; the requests being decoded occupy its first rows, without gaps.

    A prompt is read into the last row, which is free as long as one of the requests is not decoded yet. Several prompts
    are read into a separate buffer and then copied.
    """

    max_pending = 0
    chunk = 512

    def __init__(self, model: GPT, slots: int) -> None:
        self._model = model
        self._one_token = one_token(model)
        self.exact = self._one_token.exact
        self._cache = self._new_cache(slots, model.config.T)
        self._buffer = self._cache.buffer  # all rows; the cache sees the occupied ones
        self._cache.lengths = []
        self._rows: list[Request] = []
        self._loaded: dict[int, Sequence[torch.Tensor]] = {}  # slot -> keys and values that need no reading
        self._partial: dict[int, tuple[KVCache, int]] = {}  # slot -> the cache its prompt is read into, and the row
        self._reader: int | None = None  # the slot whose prompt is in the last row

    def _new_cache(self, rows: int, capacity: int, buffer: torch.Tensor | None = None) -> KVCache:
        weight = self._model.tok_emb.weight
        return KVCache(
            self._model.config, rows, device=weight.device, dtype=weight.dtype, capacity=capacity, buffer=buffer
        )

    def load(self, request: Request, parts: Sequence[torch.Tensor]) -> None:
        self._loaded[request.slot] = parts

    def read(self, requests: Sequence[Request], number: int) -> None:
        model, first = self._model, requests[0]
        if first.read > first.loaded:
            cache, _ = self._partial[first.slot]
        else:
            if len(requests) == 1 and self._reader in (None, first.slot):
                self._reader = first.slot
                cache = self._new_cache(1, model.config.T, self._buffer[:, -1:])
            else:
                end = max(request.read for request in requests) + number
                cache = self._new_cache(len(requests), max(end, *(request.length for request in requests)))
            for row, request in enumerate(requests):
                self._partial[request.slot] = cache, row
                _fill(cache.buffer[:, row], self._loaded.get(request.slot, ()))
        cache.lengths = [request.read for request in requests]  # also if an earlier attempt failed
        model.hidden(pad_right(next_prompt_tokens(requests, number), model.device), cache=cache)

    def keys_and_values(self, request: Request, start: int, end: int) -> torch.Tensor:
        return self._buffer[:, self._rows.index(request), :, :, start:end].clone()

    def start(self, request: Request) -> None:
        length, row = request.length - 1, len(self._rows)
        if length < self._model.config.T:
            target, loaded = self._buffer[:, row], self._loaded.pop(request.slot, ())
            if request.slot in self._partial:
                cache, cache_row = self._partial.pop(request.slot)
                if self._reader != request.slot or row < self._buffer.shape[1] - 1:
                    target[:, :, :, :length] = cache.buffer[:, cache_row, :, :, :length]
            else:
                _fill(target, loaded)
            self._reader = None if self._reader == request.slot else self._reader
            self._rows.append(request)
            self._cache.lengths.append(length)
            self._cache.buffer = self._buffer[:, : row + 1]

    def drop(self, request: Request) -> None:
        self._partial.pop(request.slot, None)
        self._loaded.pop(request.slot, None)
        self._reader = None if self._reader == request.slot else self._reader
        if request in self._rows:  # move the last row into the gap
            row, last = self._rows.index(request), len(self._rows) - 1
            lengths = self._cache.lengths
            if row < last:
                n = lengths[last]
                self._buffer[:, row, :, :, :n] = self._buffer[:, last, :, :, :n]
                self._rows[row], lengths[row] = self._rows[last], lengths[last]
            self._rows.pop()
            lengths.pop()
            self._cache.buffer = self._buffer[:, :last]

    def decode(self) -> PendingTokens | None:
        if not self._rows:
            return None
        last = torch.tensor([request.ids[-1] for request in self._rows], device=self._model.device)
        lengths = self._cache.lengths
        try:
            return self._choose(list(self._rows), self._one_token(last, self._cache))
        except BaseException:
            self._cache.lengths = lengths  # no request got a token, so the next call repeats this step
            raise

    def window(self, requests: list[Request]) -> PendingTokens | None:
        ids = torch.tensor([request.ids[-self._model.config.T :] for request in requests], device=self._model.device)
        hidden, logits = halves(self._model)
        return self._choose(requests, logits(hidden(ids)[:, -1])[:, : self._model.sampled_ids])

    def release(self, *, keep: bool) -> None:
        self._rows.clear()

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> ReadyTokens:
        """Choose a token for each request, together for requests with equal sampling."""
        groups: dict[Sampling, list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(request.sampling, []).append(row)
        simple = all(request.simple for request in requests)
        chosen_from = logits if simple else self._adjusted(requests, logits)
        tokens = [0] * len(requests)
        for sampling, rows in groups.items():
            draws = [requests[row].draw for row in rows] if sampling.temperature else []
            group_logits = chosen_from if len(groups) == 1 else chosen_from[rows]
            seen = [requests[row].seen for row in rows]
            chosen = choose(group_logits, sampling, torch.tensor(draws, dtype=torch.float64), seen)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                tokens[row] = token
        ready = ReadyTokens(requests, tokens)
        if not simple:
            wanted = [(row, r, r.logprobs) for row, r in enumerate(requests) if r.logprobs is not None]
            if wanted:
                rows, askers, top = map(list, zip(*wanted, strict=True))
                shown = token_logprobs(logits[rows], [tokens[row] for row in rows], top)
                ready.logprobs = {request: [each] for request, each in zip(askers, shown, strict=True)}
        return ready

    def _adjusted(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits with the penalties and biases of each request."""
        rows = [
            adjust(row, r.counts, presence=r.presence_penalty, frequency=r.frequency_penalty, bias=r.logit_bias)
            for row, r in zip(logits, requests, strict=True)
        ]
        return torch.stack(rows)


def _fill(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write keys and values (L, 2, G, n, D) one after the other into target (L, 2, G, T, D)."""
    start = 0
    for part in parts:
        target.narrow(3, start, part.shape[3]).copy_(part)
        start += part.shape[3]


def next_prompt_tokens(requests: Sequence[Request], number: int) -> list[list[int]]:
    """Return up to `number` unread tokens of each request. The last one is not read, but decoded from."""
    return [r.context[r.read : min(r.read + number, r.length - 1)] for r in requests]


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return (B, longest) ids, padded with zeros on the right, which causal attention does not see."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
