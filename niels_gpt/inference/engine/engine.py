"""Continuous batching: requests join and leave between the steps of one batch, each as if it were alone."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.request import (
    End,
    Event,
    Request,
    new_tokens,
    prompt_ids,
)
from niels_gpt.inference.engine.slots import PendingTokens, PlainSlots, Slots
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import at_rest, evaluating
from niels_gpt.model.gpt import GPT


class Engine:
    """Decodes up to `slots` requests together; the others wait in the order in which they came.

    One thread calls `step`; any may call `submit` and `cancel`. What a request gets depends on its prompt, its sampling
    and its numbers alone (up to near-ties within float error), not on who decodes beside it. The model's weights must
    not change while requests run. Dropout is not applied.

    On CUDA it decodes in graphs once a model has had some hundred steps and their kernels are compiled, in the
    background, and by plain operations until then. Graphs run ahead of the reading: `step` may bring no token at first,
    and several of a request later.
    """

    def __init__(self, model: GPT, *, slots: int = 32, chunk: int | None = None) -> None:
        """Prompts are read `chunk` tokens at a time, between the steps of the others. Raises ValueError below 1."""
        if slots < 1 or (chunk is not None and chunk < 1):
            raise ValueError(f"slots and chunk must be at least 1, got {slots} and {chunk}")
        self.model = model
        graphs = cuda_slots.acquire(model, slots)
        at_once = graphs is not None and graphs.settled and graphs.failure is None
        self._slots: Slots = graphs if graphs is not None and at_once else PlainSlots(model, slots)
        self._graphs = None if at_once else graphs  # until they are settled
        self._graphs_to_come = graphs is None and cuda_slots.usable(model)  # when there have been enough steps
        self._size = slots
        self._asked = chunk
        self._chunk = chunk or self._slots.chunk
        self._free = list(range(slots))
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._reading: deque[Request] = deque()
        self._inside: list[Request] = []  # decoded from the cache
        self._outside: list[Request] = []  # past T: each token needs the whole window
        self._flights: deque[list[PendingTokens]] = deque()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        stop: Iterable[int] = (),
    ) -> Request:
        """Queue a prompt. It ends after max_new_tokens, or with the first token that is one of `stop`.

        The numbers that sampling needs are drawn now: from `generator`, or one of its own with this `seed`, or torch's
        default one. Raises ValueError for an empty prompt, what is no id of the vocabulary, and max_new_tokens that are
        no integer from 1 to `config.MOST_TOKENS`.
        """
        ids, number = prompt_ids(prompt, self.model.config.V), new_tokens(max_new_tokens, 1)
        if generator is not None and seed is not None:
            raise ValueError("a generator and a seed exclude each other: give one of them")
        sampling = sampling or Sampling()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        if sampling.temperature == 0.0:
            uniform = torch.zeros(number, dtype=torch.float64)
        else:
            uniform = torch.rand(number, generator=generator, dtype=torch.float64)
        return self.add(ids, max_new_tokens=number, sampling=sampling, uniform=uniform, stop=stop)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        uniform: torch.Tensor,
        stop: Iterable[int] = (),
    ) -> Request:
        """`submit` with numbers that are drawn already, (max_new_tokens,) float64; nothing is checked."""
        request = Request(list(prompt), len(prompt), max_new_tokens, sampling, frozenset(stop), uniform)
        with self._lock:
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; no event comes of it from the next `step` on. Nothing happens to one that has ended."""
        with self._lock:
            self._cancelled.append(request)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        with self._lock:
            return bool(self._waiting or self._reading or self._inside or self._outside or self._flights)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Take up what was asked for, read a piece of a prompt, decode all others by a token or more.

        The events in the order of the tokens, for each request.
        """
        self._take_up()
        if self._graphs_to_come:
            self._graphs = cuda_slots.acquire(self.model, self._size)
            self._graphs_to_come = self._graphs is None
        if self._graphs is not None and self._graphs.settled:
            self._switch()
        with contextlib.nullcontext() if at_rest(self.model) else evaluating(self.model):
            self._read()
            flights = self._launch()
        if flights:
            self._flights.append(flights)
        if self._flights and (len(self._flights) > self._slots.ahead or not flights):
            return [event for flight in self._flights.popleft() for event in self._land(flight)]
        return []

    def settle(self) -> None:
        """Wait until the kernels are compiled, so that no token is decoded without them. For a server that starts."""
        if self._graphs_to_come:
            self._graphs, self._graphs_to_come = cuda_slots.acquire(self.model, self._size, at_once=True), False
        if self._graphs is not None:
            self._graphs.settle()

    def close(self, *, keep: bool = True) -> None:
        """End all requests. `keep` what was captured for the model, and its memory, for its next engine."""
        with self._lock:
            for request in [*self._waiting, *self._reading, *self._inside, *self._outside]:
                self._end(request, "cancelled")
            for flight in (flight for flights in self._flights for flight in flights):
                for request in flight.requests:
                    request.finished = request.finished or "cancelled"
            self._flights.clear()
        for slots in (self._slots, self._graphs):
            if slots is not None:
                slots.release(keep=keep)

    def _switch(self) -> None:
        """From plain slots, which have nothing on its way between two steps, to graphs: they read everything again."""
        assert self._graphs is not None
        if self._graphs.failure is not None:
            warnings.warn(f"decoding goes on without compiled kernels: {self._graphs.failure}", stacklevel=3)
        else:
            self._slots = self._graphs
            self._chunk = self._asked or self._slots.chunk
            self._reading = deque([*self._inside, *self._outside, *self._reading])
            self._inside, self._outside = [], []
            for request in self._reading:
                request.read = 0
        self._graphs = None

    def _take_up(self) -> None:
        """Cancel, and give free slots to those who wait."""
        with self._lock:
            for request in self._cancelled:
                if request.finished is None:
                    self._end(request, "cancelled")
            self._cancelled.clear()
            while self._waiting and self._free:
                request = self._waiting.popleft()
                request.slot = self._free.pop(0)
                self._reading.append(request)

    def _end(self, request: Request, why: End) -> None:
        request.finished = why
        if request.slot < 0:
            self._waiting.remove(request)
            return
        for place in (self._reading, self._inside, self._outside):
            if request in place:
                place.remove(request)
        self._slots.drop(request)
        self._free.append(request.slot)

    def _read(self) -> None:
        """A piece of the prompt that came first; short ones that follow it are read along with it."""
        T = self.model.config.T
        while self._reading and (len(self._reading[0].ids) > T or len(self._reading[0].ids) == 1):
            self._start(self._reading.popleft())  # nothing to read
        if not self._reading:
            return
        first = self._reading[0]
        number = len(first.ids) - 1 - first.read
        group = [first]
        if first.read == 0 and number <= self._chunk:
            for request in list(self._reading)[1:]:
                longest = max(number, len(request.ids) - 1)
                if not 1 < len(request.ids) <= T or longest * (len(group) + 1) > self._chunk:
                    break
                group.append(request)
                number = longest
        self._slots.read(group, min(number, self._chunk))
        for request in group:
            request.read = min(request.read + self._chunk, len(request.ids) - 1)
            if request.read == len(request.ids) - 1:
                self._reading.popleft()
                self._start(request)

    def _start(self, request: Request) -> None:
        outside = len(request.ids) > self.model.config.T
        (self._outside if outside else self._inside).append(request)
        self._slots.start(request)

    def _launch(self) -> list[PendingTokens]:
        """A token or more for everyone who has started."""
        T = self.model.config.T
        window = self._slots.window(list(self._outside)) if self._outside else None
        flights = [flight for flight in (self._slots.decode(), window) if flight is not None]
        for flight in flights:
            for request, count in zip(flight.requests, flight.counts, strict=True):
                request.launched += count
                done = request.launched == request.max_new_tokens
                if request in self._inside and (done or request.prompt_length + request.launched > T):
                    self._inside.remove(request)
                    self._slots.drop(request)
                    if not done:
                        self._outside.append(request)
                elif done:
                    self._outside.remove(request)
        return flights

    def _land(self, flight: PendingTokens) -> list[Event]:
        """Hand out the tokens of a launch; those of a request that has ended meanwhile are nobody's."""
        events = []
        for request, tokens in zip(flight.requests, flight.tokens(), strict=True):
            if request.finished is not None:
                continue
            why: End | None = None
            if request.stop:
                end = next((i for i, token in enumerate(tokens) if token in request.stop), None)
                if end is not None:
                    tokens, why = tokens[: end + 1], "stop"
            request.ids += tokens
            if why is None and request.landed == request.max_new_tokens:
                why = "length"
            if why is not None:
                self._end(request, why)
            events.append(Event(request, tokens, why))
        return events
