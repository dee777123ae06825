"""Where an engine keeps its requests while they are decoded, and how they grow by a token: on any device.

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
    """Tokens on their way."""

    requests: list[Request]
    counts: list[int]
    """How many of each request: at least one, and none past its end, or past the first beyond T."""

    def tokens(self) -> list[list[int]]:
        """The tokens of each request; waits for them."""


class Slots(Protocol):
    """Room for requests: read, then started, then decoded until they are dropped."""

    ahead: int
    """How many launches may be on their way before the first is waited for."""
    chunk: int
    """The most tokens of prompts that are read at once, where nothing else is asked for."""

    def read(self, requests: Sequence[Request], number: int) -> None:
        """The next `number` tokens of one request; or whole prompts of several of which nothing is read yet."""

    def start(self, request: Request) -> None:
        """All but its last token are read: from now on it is decoded. A request longer than T needs no reading."""

    def drop(self, request: Request) -> None:
        """Forget a request."""

    def decode(self) -> PendingTokens | None:
        """Launch a token or more for all that have started and lie within T; None where there are none."""

    def window(self, requests: list[Request]) -> PendingTokens | None:
        """Launch a token for requests past T, from their last T tokens. None: not before all of theirs have landed."""

    def release(self, *, keep: bool) -> None:
        """No request is left, and none will come. `keep` what the next engine of the model can use."""


class ReadyTokens:
    """Tokens that are there."""

    def __init__(self, requests: list[Request], tokens: list[int]) -> None:
        self.requests = requests
        self.counts = [1] * len(requests)
        self._tokens = tokens

    def tokens(self) -> list[list[int]]:
        return [[token] for token in self._tokens]


class PlainSlots:
    """One buffer of keys and values; the requests that are decoded are its first rows, without a gap."""

    ahead = 0
    chunk = 512

    def __init__(self, model: GPT, slots: int) -> None:
        config = model.config
        self._model = model
        self._one_token = one_token(model)
        self._cache = self._new_cache(slots, config.T)
        self._whole = self._cache.buffer
        self._cache.lengths = []
        self._rows: list[Request] = []
        self._half_read: dict[int, tuple[KVCache, int]] = {}  # slot -> its cache while a prompt is read, and the row

    def _new_cache(self, rows: int, room: int) -> KVCache:
        weight = self._model.tok_emb.weight
        return KVCache(self._model.config, rows, device=weight.device, dtype=weight.dtype, capacity=room)

    def read(self, requests: Sequence[Request], number: int) -> None:
        model, first = self._model, requests[0]
        if first.read:
            cache, _ = self._half_read[first.slot]
        else:
            room = max(len(request.ids) for request in requests)
            cache = self._new_cache(len(requests), room)
            for row, request in enumerate(requests):
                self._half_read[request.slot] = cache, row
        pieces = [request.ids[request.read : min(request.read + number, len(request.ids) - 1)] for request in requests]
        model.hidden(padded(pieces, model.device), cache=cache)

    def start(self, request: Request) -> None:
        length, row = len(request.ids) - 1, len(self._rows)
        if length < self._model.config.T:
            if length:
                cache, theirs = self._half_read.pop(request.slot)
                self._whole[:, row, :, :, :length] = cache.buffer[:, theirs, :, :, :length]
            self._rows.append(request)
            self._cache.lengths.append(length)
            self._cache.buffer = self._whole[:, : row + 1]

    def drop(self, request: Request) -> None:
        self._half_read.pop(request.slot, None)
        if request in self._rows:  # the last row takes its place
            row, last = self._rows.index(request), len(self._rows) - 1
            lengths = self._cache.lengths
            if row < last:
                n = lengths[last]
                self._whole[:, row, :, :, :n] = self._whole[:, last, :, :, :n]
                self._rows[row], lengths[row] = self._rows[last], lengths[last]
            self._rows.pop()
            lengths.pop()
            self._cache.buffer = self._whole[:, :last]

    def decode(self) -> PendingTokens | None:
        if not self._rows:
            return None
        last = torch.tensor([request.ids[-1] for request in self._rows], device=self._model.device)
        lengths = self._cache.lengths
        try:
            return self._chosen(list(self._rows), self._one_token(last, self._cache))
        except BaseException:
            self._cache.lengths = lengths  # nobody has got a token: the next call begins where this one did
            raise

    def window(self, requests: list[Request]) -> PendingTokens | None:
        ids = torch.tensor([request.ids[-self._model.config.T :] for request in requests], device=self._model.device)
        return self._chosen(requests, self._model.lm_head(self._model.hidden(ids)[:, -1]))

    def release(self, *, keep: bool) -> None:
        self._rows.clear()

    def _chosen(self, requests: list[Request], logits: torch.Tensor) -> ReadyTokens:
        """A token of each: requests of one kind of sampling together."""
        kinds: dict[Sampling, list[int]] = {}
        for row, request in enumerate(requests):
            kinds.setdefault(request.sampling, []).append(row)
        tokens = [0] * len(requests)
        for sampling, rows in kinds.items():
            mine = [requests[row] for row in rows]
            uniform = torch.tensor([request.uniform[request.launched] for request in mine], dtype=torch.float64)
            some = logits if len(kinds) == 1 else logits[rows]
            for row, token in zip(rows, choose(some, sampling, uniform).tolist(), strict=True):
                tokens[row] = token
        return ReadyTokens(requests, tokens)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """One tensor, zeros on the right: attention is causal, so no real token sees the padding."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
