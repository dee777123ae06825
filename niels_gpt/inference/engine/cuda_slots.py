"""An engine's slots on CUDA: graphs of several steps, launched before the tokens of the previous launch are read.

There is one graph per power of two of rows. Row lengths live on the device, so a graph serves all lengths. Kernels
compile in the background; compiled kernels and captured graphs of a model are kept for its next engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from niels_gpt.inference.engine.request import Request
from niels_gpt.inference.engine.slots import next_prompt_tokens, pad_right
from niels_gpt.inference.logprobs import TokenLogprobs
from niels_gpt.kernels.decoding.step import RING, STOCK, DecodeStep, SlotState, Weights, WindowStep, power
from niels_gpt.model.backend import decodes
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache
from niels_gpt.system.device import HAS_TRITON

STEPS = 8
"""Tokens per row and launch."""

R = TypeVar("R", DecodeStep, WindowStep)
_idle: weakref.WeakKeyDictionary[GPT, CudaSlots] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[GPT, int] = weakref.WeakKeyDictionary()

PLAIN_STEPS = 256
"""Steps of a model that run as plain operations before its kernels are compiled. Compiling holds the interpreter lock,
so a few hundred tokens in a new process, or a sample during training, are faster without it."""


def usable(model: GPT) -> bool:
    """Whether a model can be decoded in graphs: a plain float32 GPT on a device with tf32, and Triton."""
    weights = list(model.parameters())
    plain = all(type(p) is torch.nn.Parameter and p.is_cuda and p.dtype == torch.float32 for p in weights)
    return (
        HAS_TRITON
        and plain
        and decodes("cuda-graphs", model)
        and torch.cuda.get_device_capability(model.device)[0] >= 8
    )


def acquire(model: GPT, slots: int, *, force: bool = False) -> CudaSlots | None:
    """Return slots if the model is usable and has run enough steps for graphs to pay off (or `force`), else None.

    The slots may not be `ready` yet. Every call counts as one step of the model.
    """
    _steps[model] = _steps.get(model, 0) + 1
    if not (force or model in _idle or _steps[model] > PLAIN_STEPS) or not usable(model):
        return None
    idle = _idle.pop(model, None)
    with torch.inference_mode(False):  # these tensors are written to later, in that mode or not
        if idle is None or not idle.fits(model, slots):
            idle = CudaSlots(model, slots)
        idle.take(model)
    return idle


class CudaSlots:
    """Slots whose state is on the device. See `Slots` for the methods; they may be called once `ready`."""

    max_pending = 2
    chunk = 4096
    exact = True

    def __init__(self, model: GPT, slots: int) -> None:
        self._size = slots
        self._memory = [p.data_ptr() for p in model.parameters()]
        self._weights = Weights(model.config, model.weights())
        self._state = SlotState(model.config, slots, model.device)
        self._model: GPT | None = None  # only while in use: idle slots must not keep the model alive
        self._rows: list[Request] = []
        self._new: list[Request] = []
        self._loaded: list[Request] = []  # rows that the device decodes
        self._windows: list[Request] = []
        self._stocked = [0] * slots  # draws of a slot that are on the device
        # One row has separate kernels; all larger batches share theirs.
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
        except Exception as err:  # compilers raise anything, and plain slots always work
            text = (str(err).strip().splitlines() or [""])[0]
            self.failure = f"{type(err).__name__}: {text}"

    @property
    def ready(self) -> bool:
        """Whether the kernels are compiled, or compiling has failed (`failure`)."""
        return not self._compiling.is_alive()

    def wait_until_ready(self) -> None:
        """Wait until `ready`."""
        self._compiling.join()

    def fits(self, model: GPT, slots: int) -> bool:
        """Whether there are enough slots and the weights have not moved in memory."""
        return self._size >= slots and self._memory == [p.data_ptr() for p in model.parameters()]

    def take(self, model: GPT) -> None:
        """Prepare for an engine of this model."""
        self._model = model
        self._weights.refresh()

    def release(self, *, keep: bool) -> None:
        assert self._model is not None
        self._rows, self._new, self._loaded, self._windows = [], [], [], []
        if keep:
            _idle[self._model] = self
        self._model = None

    def load(self, request: Request, parts: Sequence[torch.Tensor]) -> None:
        start = 0
        for part in parts:
            self._state.cache[:, request.slot].narrow(3, start, part.shape[3]).copy_(part)
            start += part.shape[3]

    def read(self, requests: Sequence[Request], number: int) -> None:
        model, state = self._model, self._state
        assert model is not None
        slots = torch.tensor([request.slot for request in requests]).to(model.device)
        end = number + max(request.read for request in requests)
        if len(requests) == 1:  # read in place
            buffer, end = state.cache[:, requests[0].slot : requests[0].slot + 1], model.config.T
        else:
            buffer = state.cache[:, slots, :, :, :end]
        cache = KVCache(
            model.config, len(requests), device=model.device, dtype=torch.float32, capacity=end, buffer=buffer
        )
        cache.lengths = [request.read for request in requests]
        model.hidden(pad_right(next_prompt_tokens(requests, number), model.device), cache=cache)
        if len(requests) > 1:
            state.cache[:, slots, :, :, :end] = cache.buffer

    def keys_and_values(self, request: Request, start: int, end: int) -> torch.Tensor:
        return self._state.cache[:, request.slot, :, :, start:end].clone()

    def start(self, request: Request) -> None:
        self._new.append(request)
        if request.length <= self._weights.config.T:
            self._rows.append(request)

    def _upload_new(self) -> None:
        """Copy the state and sampling of the requests that have started since the last launch to the device."""
        if not self._new:
            return
        V, state = len(self._weights.head), self._state
        rows = []
        for request in self._new:
            sampling = request.sampling
            top_p = 1.0 if sampling.top_p is None else sampling.top_p
            top_k = V if sampling.top_k is None else min(sampling.top_k, V)
            integers = [request.slot, request.length - 1, request.ids[-1], request.launched, top_k]
            rows.append([*map(float, integers), sampling.temperature, top_p, sampling.min_p or 0.0])
            self._stocked[request.slot] = request.launched
        self._new = []
        table = torch.tensor(rows, dtype=torch.float64).to(state.cache.device)
        slots = table[:, 0].long()
        for column, target in enumerate((state.lengths, state.tokens, state.drawn, state.counts), start=1):
            target[slots] = table[:, column].to(target.dtype)
        state.numbers[slots] = table[:, 5:]

    def drop(self, request: Request) -> None:
        for rows in (self._rows, self._new):
            if request in rows:
                rows.remove(request)
        if request in self._windows:
            self._windows = []  # the other requests are loaded again

    def decode(self) -> _Launch | None:
        if not self._rows:
            return None
        self._upload_new()
        if self._rows != self._loaded:
            size = power(len(self._rows))
            if size not in self._decoding:
                self._decoding[size] = _Batch(DecodeStep(self._weights, self._state, size))
            self._batch = self._decoding[size]
            self._batch.prepare(STEPS)
            self._batch.rows.load([request.slot for request in self._rows])
            self._loaded = list(self._rows)
        for request in self._rows:
            self._restock(request, STEPS)
        T = self._weights.config.T
        until_window = [T + 1 - r.prompt_length - r.launched + r.dropped for r in self._rows]
        left = [request.max_new_tokens - request.launched for request in self._rows]
        counts = [min(STEPS, *both) for both in zip(until_window, left, strict=True)]
        return self._batch.launch(list(self._rows), counts)

    def window(self, requests: list[Request]) -> _Launch | None:
        T, size = self._weights.config.T, power(len(requests))
        self._upload_new()
        if requests != self._windows:
            if any(request.received < request.launched for request in requests):
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
        """Copy the draws of the next steps to the device, and as many more as its ring buffer holds."""
        have = self._stocked[request.slot]
        if request.sampling.temperature == 0.0 or have >= min(request.launched + steps, request.max_new_tokens):
            return
        end = min(request.launched + STOCK, request.max_new_tokens)
        ring = self._state.uniform[request.slot]
        while have < end:
            at = have % STOCK
            n = min(end - have, STOCK - at)
            ring[at : at + n] = request.uniform[have : have + n].to(ring.device)
            have += n
        self._stocked[request.slot] = end


class _Batch(Generic[R]):
    """The rows of one batch size, their graph, and the host buffer for their tokens."""

    def __init__(self, rows: R) -> None:
        self.rows: R = rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0
        self._done = 0  # steps launched so far
        self._host = torch.zeros((RING, rows.batch), dtype=torch.int64, pin_memory=torch.cuda.is_available())

    def prepare(self, steps: int) -> None:
        """Capture a graph of `steps` steps, if there is none yet."""
        if self._graph is None:
            self._graph = self.rows.capture(steps)
            self.rows.clock.zero_()
            self._steps = steps

    def launch(self, requests: list[Request], counts: list[int]) -> _Launch:
        """Launch the graph and the copy of its tokens to the host."""
        assert self._graph is not None
        self._graph.replay()
        at = self._done % RING
        self._done += self._steps
        host = self._host[at : at + self._steps]
        host.copy_(self.rows.ring[at : at + self._steps], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Launch(requests, counts, host, event)


class _Launch:
    """Pending tokens of a launch; `tokens` waits for the copy to the host."""

    def __init__(self, requests: list[Request], counts: list[int], host: torch.Tensor, event: torch.cuda.Event) -> None:
        self.requests, self.counts = requests, counts
        self.logprobs: dict[Request, list[TokenLogprobs]] = {}  # never: graphs return tokens only
        self._host, self._event = host, event

    def tokens(self) -> list[list[int]]:
        self._event.synchronize()
        columns = self._host.t().tolist()
        return [columns[row][:count] for row, count in enumerate(self.counts)]
