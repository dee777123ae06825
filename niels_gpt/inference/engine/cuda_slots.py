"""An engine's slots on CUDA: graphs of several steps, launched before the tokens of the last are read.

A graph per power of two of rows; the length of a row is a number on the device, so no graph belongs to a length.
Kernels compile in the background, and what was compiled and captured for a model is kept for its next engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.engine.slots import padded
from niels_gpt.kernels.decoding.step import (
    RING,
    STOCK,
    DecodeStep,
    SlotState,
    Weights,
    WindowStep,
    power,
)
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.device import HAS_TRITON

STEPS = 8
"""Tokens of every row per launch."""

R = TypeVar("R", DecodeStep, WindowStep)
_idle: weakref.WeakKeyDictionary[GPT, CudaSlots] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[GPT, int] = weakref.WeakKeyDictionary()

PLAIN_STEPS = 256
"""Steps of a model that are decoded by plain operations before its kernels are compiled. Compilers take the interpreter
from everyone else: who wants a few hundred tokens of a fresh process, or a sample in mid-training, is served sooner
without."""


def usable(model: GPT) -> bool:
    """Whether a model can be decoded in graphs: a plain GPT in float32, on a device that has tf32, with Triton."""
    weights = list(model.parameters())
    plain = all(type(p) is torch.nn.Parameter and p.is_cuda and p.dtype == torch.float32 for p in weights)
    return (
        HAS_TRITON
        and plain
        and not model.config.n_kv_heads  # attend_kernel has one head of keys per query head
        and type(model).forward is GPT.forward
        and torch.cuda.get_device_capability(model.device)[0] >= 8
    )


def acquire(model: GPT, slots: int, *, at_once: bool = False) -> CudaSlots | None:
    """Slots for a step of a model, if it is usable and has had enough steps for them to pay (or `at_once`).

    They may not be settled yet.
    """
    _steps[model] = _steps.get(model, 0) + 1
    if not (at_once or model in _idle or _steps[model] > PLAIN_STEPS) or not usable(model):
        return None
    kept = _idle.pop(model, None)
    with torch.inference_mode(False):  # what is made here is written to later, in that mode or not
        if kept is None or not kept.fits(model, slots):
            kept = CudaSlots(model, slots)
        kept.take(model)
    return kept


class CudaSlots:
    """Slots whose state lies on the device; see `Slots` for what its methods promise. Not before `settled`."""

    ahead = 2
    chunk = 4096

    def __init__(self, model: GPT, slots: int) -> None:
        self._size = slots
        self._memory = [p.data_ptr() for p in model.parameters()]
        self._weights = Weights(model.config, model.weights())
        self._state = SlotState(model.config, slots, model.device)
        self._model: GPT | None = None  # only while in use: what is kept for later does not keep the model
        self._rows: list[Request] = []
        self._fresh: list[Request] = []
        self._seated: list[Request] = []  # as the device knows them
        self._windows: list[Request] = []
        self._stocked = [0] * slots  # numbers of a slot that are on the device
        # One row has kernels of its own; all other numbers share theirs.
        self._decoding = {rows: _Batch(DecodeStep(self._weights, self._state, rows)) for rows in (1, 2)[:slots]}
        self._outside: dict[int, _Batch[WindowStep]] = {}
        self._batch = self._decoding[1]
        self.failure: str | None = None
        self._compiling = threading.Thread(target=self._compile)
        self._compiling.start()

    def _compile(self) -> None:
        try:
            for batch in self._decoding.values():
                batch.rows.compile()
        except Exception as err:  # of any kind: compilers are at work, and the plain way is always open
            text = (str(err).strip().splitlines() or [""])[0]
            self.failure = f"{type(err).__name__}: {text}"

    @property
    def settled(self) -> bool:
        """Whether the kernels are compiled, or it has become clear that they will not be (`failure`)."""
        return not self._compiling.is_alive()

    def settle(self) -> None:
        """Wait for that."""
        self._compiling.join()

    def fits(self, model: GPT, slots: int) -> bool:
        """Whether these slots are enough, and the weights still where they were."""
        return self._size >= slots and self._memory == [p.data_ptr() for p in model.parameters()]

    def take(self, model: GPT) -> None:
        """Serve an engine of this model."""
        self._model = model
        self._weights.refresh()

    def release(self, *, keep: bool) -> None:
        assert self._model is not None
        self._rows, self._fresh, self._seated, self._windows = [], [], [], []
        if keep:
            _idle[self._model] = self
        self._model = None

    def read(self, requests: Sequence[Request], number: int) -> None:
        model, state = self._model, self._state
        assert model is not None
        pieces = [request.ids[request.read : min(request.read + number, len(request.ids) - 1)] for request in requests]
        slot = requests[0].slot
        alone = state.cache[:, slot : slot + 1] if len(requests) == 1 else None
        room = number if alone is None else None
        cache = KVCache(
            model.config, len(requests), device=model.device, dtype=torch.float32, capacity=room, buffer=alone
        )
        cache.lengths = [request.read for request in requests]
        model.hidden(padded(pieces, model.device), cache=cache)
        if alone is None:
            at = torch.tensor([request.slot for request in requests]).to(model.device)
            state.cache[:, at, :, :, :number] = cache.buffer

    def start(self, request: Request) -> None:
        self._fresh.append(request)
        if len(request.ids) <= self._weights.config.T:
            self._rows.append(request)

    def _settings(self) -> None:
        """What the device must know of those who have started since the last launch."""
        if not self._fresh:
            return
        V, state = self._weights.config.V, self._state
        rows = []
        for request in self._fresh:
            sampling = request.sampling
            top_p = 1.0 if sampling.top_p is None else sampling.top_p
            top_k = V if sampling.top_k is None else min(sampling.top_k, V)
            place = [request.slot, len(request.ids) - 1, request.ids[-1], request.launched, top_k]
            rows.append([*map(float, place), sampling.temperature, top_p, sampling.min_p or 0.0])
            self._stocked[request.slot] = request.launched
        self._fresh = []
        table = torch.tensor(rows, dtype=torch.float64).to(state.cache.device)
        at = table[:, 0].long()
        for column, kept in enumerate((state.lengths, state.tokens, state.drawn, state.counts), start=1):
            kept[at] = table[:, column].to(kept.dtype)
        state.numbers[at] = table[:, 5:]

    def drop(self, request: Request) -> None:
        for rows in (self._rows, self._fresh):
            if request in rows:
                rows.remove(request)
        if request in self._windows:
            self._windows = []  # the others are seated anew

    def decode(self) -> _Flight | None:
        if not self._rows:
            return None
        self._settings()
        if self._rows != self._seated:
            size = power(len(self._rows))
            if size not in self._decoding:
                self._decoding[size] = _Batch(DecodeStep(self._weights, self._state, size))
            self._batch = self._decoding[size]
            self._batch.prepare(STEPS)
            self._batch.rows.load([request.slot for request in self._rows])
            self._seated = list(self._rows)
        for request in self._rows:
            self._restock(request, STEPS)
        T = self._weights.config.T
        room = [T + 1 - request.prompt_length - request.launched for request in self._rows]
        left = [request.max_new_tokens - request.launched for request in self._rows]
        counts = [min(STEPS, *both) for both in zip(room, left, strict=True)]
        return self._batch.launch(list(self._rows), counts)

    def window(self, requests: list[Request]) -> _Flight | None:
        T, size = self._weights.config.T, power(len(requests))
        self._settings()
        if requests != self._windows:
            if any(request.landed < request.launched for request in requests):
                return None
            if size not in self._outside:
                assert self._model is not None
                self._outside[size] = _Batch(WindowStep(self._model.hidden, self._weights, self._state, size))
            batch = self._outside[size]
            batch.prepare(1)
            batch.rows.load([r.slot for r in requests], [r.ids[-T:] for r in requests], [r.launched for r in requests])
            self._windows = list(requests)
        for request in requests:
            self._restock(request, 1)
        return self._outside[size].launch(requests, [1] * len(requests))

    def _restock(self, request: Request, steps: int) -> None:
        """The numbers of the next steps to the device, and as many more as there is room for."""
        have = self._stocked[request.slot]
        if request.sampling.temperature == 0.0 or have >= min(request.launched + steps, request.max_new_tokens):
            return
        end = min(request.launched + STOCK, request.max_new_tokens)
        mine = self._state.uniform[request.slot]
        while have < end:
            at = have % STOCK
            n = min(end - have, STOCK - at)
            mine[at : at + n] = request.uniform[have : have + n].to(mine.device)
            have += n
        self._stocked[request.slot] = end


class _Batch(Generic[R]):
    """The rows of one size, their graph, and the way of their tokens to the host."""

    def __init__(self, rows: R) -> None:
        self.rows: R = rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._done = 0  # steps so far
        self._host = torch.zeros((RING, rows.batch), dtype=torch.int64, pin_memory=torch.cuda.is_available())

    def prepare(self, steps: int) -> None:
        """Capture so many steps, if that is not done."""
        if self._graph is None:
            self._graph = self.rows.capture(steps)
            self.rows.clock.zero_()
            self._steps = steps

    def launch(self, requests: list[Request], counts: list[int]) -> _Flight:
        """Play the graph; its tokens follow it to the host."""
        assert self._graph is not None
        self._graph.replay()
        at = self._done % RING
        self._done += self._steps
        mine = self._host[at : at + self._steps]
        mine.copy_(self.rows.ring[at : at + self._steps], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Flight(requests, counts, mine, event)


class _Flight:
    def __init__(self, requests: list[Request], counts: list[int], host: torch.Tensor, event: torch.cuda.Event) -> None:
        self.requests, self.counts = requests, counts
        self._host, self._event = host, event

    def tokens(self) -> list[list[int]]:
        self._event.synchronize()
        columns = self._host.t().tolist()
        return [columns[row][:count] for row, count in enumerate(self.counts)]
