"""The slots of an engine: where requests live while they are decoded. This implementation runs on any device.

`cuda_slots.py` does the same in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.int8 import one_token
from niels_gpt.inference.sampling import Sampling, choose
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache


class PendingTokens(Protocol):
    """Tokens that were launched and may not have been computed yet."""

    requests: list[Request]
    counts: list[int]
    """New tokens per request: at least one, none after its end, and at most one beyond T."""

    def tokens(self) -> list[list[int]]:
        """Wait for the tokens and return those of each request."""


class Slots(Protocol):
    """Storage for a fixed number of requests: each is read, then started, then decoded until it is dropped."""

    max_pending: int
    """Launches that may be pending before the engine waits for the first."""
    chunk: int
    """Default limit on the prompt tokens that are read at once."""

    def read(self, requests: Sequence[Request], number: int) -> None:
        """Read the next `number` prompt tokens of one request, or the complete prompts of several new requests."""

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
        self._tokens = tokens

    def tokens(self) -> list[list[int]]:
        return [[token] for token in self._tokens]


class PlainSlots:
    """Slots in one KV buffer; the requests being decoded occupy its first rows, without gaps."""

    max_pending = 0
    chunk = 512

    def __init__(self, model: GPT, slots: int) -> None:
        self._model = model
        self._one_token = one_token(model)
        self._cache = self._new_cache(slots, model.config.T)
        self._buffer = self._cache.buffer  # all rows; the cache sees the occupied ones
        self._cache.lengths = []
        self._rows: list[Request] = []
        self._partial: dict[int, tuple[KVCache, int]] = {}  # slot -> the cache its prompt is read into, and the row

    def _new_cache(self, rows: int, capacity: int) -> KVCache:
        weight = self._model.tok_emb.weight
        return KVCache(self._model.config, rows, device=weight.device, dtype=weight.dtype, capacity=capacity)

    def read(self, requests: Sequence[Request], number: int) -> None:
        model, first = self._model, requests[0]
        if first.read:
            cache, _ = self._partial[first.slot]
        else:
            cache = self._new_cache(len(requests), max(len(request.ids) for request in requests))
            for row, request in enumerate(requests):
                self._partial[request.slot] = cache, row
        model.hidden(pad_right(next_prompt_tokens(requests, number), model.device), cache=cache)

    def start(self, request: Request) -> None:
        length, row = len(request.ids) - 1, len(self._rows)
        if length < self._model.config.T:
            if length:
                cache, cache_row = self._partial.pop(request.slot)
                self._buffer[:, row, :, :, :length] = cache.buffer[:, cache_row, :, :, :length]
            self._rows.append(request)
            self._cache.lengths.append(length)
            self._cache.buffer = self._buffer[:, : row + 1]

    def drop(self, request: Request) -> None:
        self._partial.pop(request.slot, None)
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
        return self._choose(requests, self._model.logits(self._model.hidden(ids)[:, -1]))

    def release(self, *, keep: bool) -> None:
        self._rows.clear()

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> ReadyTokens:
        """Choose a token for each request, together for requests with equal sampling."""
        groups: dict[Sampling, list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(request.sampling, []).append(row)
        tokens = [0] * len(requests)
        for sampling, rows in groups.items():
            draws = [requests[row].uniform[requests[row].launched] for row in rows]
            group_logits = logits if len(groups) == 1 else logits[rows]
            chosen = choose(group_logits, sampling, torch.tensor(draws, dtype=torch.float64))
            for row, token in zip(rows, chosen.tolist(), strict=True):
                tokens[row] = token
        return ReadyTokens(requests, tokens)


def next_prompt_tokens(requests: Sequence[Request], number: int) -> list[list[int]]:
    """Return up to `number` unread prompt tokens of each request. The last one is not read, but decoded from."""
    return [request.ids[request.read : min(request.read + number, len(request.ids) - 1)] for request in requests]


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return (B, longest) ids, padded with zeros on the right, which causal attention does not see."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
