"""Continuous batching: requests join and leave between the steps of one batch, each decoded as if alone."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.request import Event, FinishReason, Request, check_new_tokens, check_prompt
from niels_gpt.inference.engine.slots import PendingTokens, PlainSlots, Slots
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import at_rest, evaluating
from niels_gpt.model.gpt import GPT


class Engine:
    """Decode up to `slots` requests together; further requests wait in the order of arrival.

    One thread calls `step`; any thread may call `submit` and `cancel`. The tokens of a request depend only on its
    prompt, its sampling and its draws (up to near-ties within float error), not on the requests beside it. The
    model's weights must not change while requests run. Dropout is off.

    On CUDA the engine first decodes with plain operations. After a few hundred steps of a model it compiles kernels in
    the background and then decodes in CUDA graphs. Graphs run ahead of the reader: `step` may return no token at
    first, and several tokens of a request later.
    """

    def __init__(self, model: GPT, *, slots: int = 32, chunk: int | None = None) -> None:
        """Prompts are read `chunk` tokens at a time, between the steps of the others. Raises ValueError below 1."""
        if slots < 1 or (chunk is not None and chunk < 1):
            raise ValueError(f"slots and chunk must be at least 1, got {slots} and {chunk}")
        self.model = model
        graphs = cuda_slots.acquire(model, slots)
        use_graphs = graphs is not None and graphs.ready and graphs.failure is None
        self._slots: Slots = graphs if graphs is not None and use_graphs else PlainSlots(model, slots)
        self._graphs = None if use_graphs else graphs  # until they are ready
        self._graphs_later = graphs is None and cuda_slots.usable(model)  # after enough steps
        self._num_slots = slots
        self._requested_chunk = chunk
        self._chunk = chunk or self._slots.chunk
        self._free = list(range(slots))
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._reading: deque[Request] = deque()
        self._inside: list[Request] = []  # decoded from the KV cache
        self._outside: list[Request] = []  # longer than T: each token recomputes the window
        self._launches: deque[list[PendingTokens]] = deque()

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
        """Queue a prompt. Its request ends after max_new_tokens, or with the first token that is in `stop`.

        The uniform draws are made now: from `generator`, or a new generator with this `seed`, or torch's default one.
        Raises ValueError for an empty prompt, an id outside the vocabulary, max_new_tokens outside
        1..`config.MOST_TOKENS`, and both a generator and a seed.
        """
        ids, number = check_prompt(prompt, self.model.config.V), check_new_tokens(max_new_tokens, 1)
        if generator is not None and seed is not None:
            raise ValueError("generator and seed exclude each other: give one of them")
        sampling = sampling or Sampling()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        if sampling.temperature == 0.0:
            uniform = torch.zeros(number, dtype=torch.float64)
        else:
            uniform = torch.rand(number, generator=generator, dtype=torch.float64)
        request = Request(ids, len(ids), number, sampling, frozenset(stop), uniform)
        with self._lock:
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; from the next `step` on it has no events. A finished request is not affected."""
        with self._lock:
            self._cancelled.append(request)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        with self._lock:
            return bool(self._waiting or self._reading or self._inside or self._outside or self._launches)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, read a chunk of one prompt, decode the others by one token or more.

        Return the events; those of one request are in the order of its tokens.
        """
        self._admit()
        if self._graphs_later:
            self._graphs = cuda_slots.acquire(self.model, self._num_slots)
            self._graphs_later = self._graphs is None
        if self._graphs is not None and self._graphs.ready:
            self._switch_to_graphs()
        with contextlib.nullcontext() if at_rest(self.model) else evaluating(self.model):
            self._read()
            launched = self._launch()
        if launched:
            self._launches.append(launched)
        if self._launches and (len(self._launches) > self._slots.max_pending or not launched):
            return [event for pending in self._launches.popleft() for event in self._receive(pending)]
        return []

    def wait_until_ready(self) -> None:
        """Wait until the kernels are compiled, so that every token uses them. For a server that starts."""
        if self._graphs_later:
            self._graphs, self._graphs_later = cuda_slots.acquire(self.model, self._num_slots, force=True), False
        if self._graphs is not None:
            self._graphs.wait_until_ready()

    def close(self, *, keep: bool = True) -> None:
        """End all requests. `keep` the captured graphs and their memory for the model's next engine."""
        with self._lock:
            for request in [*self._waiting, *self._reading, *self._inside, *self._outside]:
                self._end(request, "cancelled")
            for pending in (pending for launched in self._launches for pending in launched):
                for request in pending.requests:
                    request.finished = request.finished or "cancelled"
            self._launches.clear()
        for slots in (self._slots, self._graphs):
            if slots is not None:
                slots.release(keep=keep)

    def _switch_to_graphs(self) -> None:
        """Replace plain slots, which have nothing pending between steps, by graphs; these read all prompts again."""
        assert self._graphs is not None
        if self._graphs.failure is not None:
            warnings.warn(f"decoding without compiled kernels: {self._graphs.failure}", stacklevel=3)
        else:
            self._slots = self._graphs
            self._chunk = self._requested_chunk or self._slots.chunk
            self._reading = deque([*self._inside, *self._outside, *self._reading])
            self._inside, self._outside = [], []
            for request in self._reading:
                request.read = 0
        self._graphs = None

    def _admit(self) -> None:
        """Carry out cancellations and give free slots to waiting requests."""
        with self._lock:
            for request in self._cancelled:
                if request.finished is None:
                    self._end(request, "cancelled")
            self._cancelled.clear()
            while self._waiting and self._free:
                request = self._waiting.popleft()
                request.slot = self._free.pop(0)
                self._reading.append(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finished = reason
        if request.slot < 0:
            self._waiting.remove(request)
            return
        for queue in (self._reading, self._inside, self._outside):
            if request in queue:
                queue.remove(request)
        self._slots.drop(request)
        self._free.append(request.slot)

    def _read(self) -> None:
        """Read a chunk of the oldest unread prompt, together with the short prompts that follow it."""
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
        """Launch one token or more for every started request."""
        T = self.model.config.T
        window = self._slots.window(list(self._outside)) if self._outside else None
        launched = [pending for pending in (self._slots.decode(), window) if pending is not None]
        for pending in launched:
            for request, count in zip(pending.requests, pending.counts, strict=True):
                request.launched += count
                done = request.launched == request.max_new_tokens
                if request in self._inside and (done or request.prompt_length + request.launched > T):
                    self._inside.remove(request)
                    self._slots.drop(request)
                    if not done:
                        self._outside.append(request)
                elif done:
                    self._outside.remove(request)
        return launched

    def _receive(self, pending: PendingTokens) -> list[Event]:
        """Append the tokens of a launch to their requests; skip requests that have finished meanwhile."""
        events = []
        for request, tokens in zip(pending.requests, pending.tokens(), strict=True):
            if request.finished is not None:
                continue
            reason: FinishReason | None = None
            if request.stop:
                end = next((i for i, token in enumerate(tokens) if token in request.stop), None)
                if end is not None:
                    tokens, reason = tokens[: end + 1], "stop"
            request.ids += tokens
            if reason is None and request.received == request.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._end(request, reason)
            events.append(Event(request, tokens, reason))
        return events
