"""Continuous batching: requests join and leave between the steps of one batch, each decoded as if alone."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import torch

from niels_gpt.config.checks import check_int
from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.prefix_cache import PrefixCache, common_length
from niels_gpt.inference.engine.request import (
    ContextOverflow,
    Event,
    FinishReason,
    Request,
    check_logit_bias,
    check_new_tokens,
    check_penalty,
    check_prompt,
    most_pinned,
)
from niels_gpt.inference.engine.slots import PendingTokens, PlainSlots, Slots
from niels_gpt.inference.logprobs import prompt_logprobs as score_prompt
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import at_rest, evaluating
from niels_gpt.model.gpt import GPT

WORTH_WAITING = 16
"""A new request that shares this many more tokens with one that is about to be read than with the prefix cache waits
for it."""


class Engine:
    """Decode up to `slots` requests together; further requests wait in the order of arrival.

    One thread calls `step`; any thread may call `submit` and `cancel`. The tokens of a request depend only on its
    prompt, its sampling and its draws (up to near-ties within float error), not on the requests beside it. The
    model's weights must not change while requests run. Dropout is off.

    On CUDA the engine first decodes with plain operations. After a few hundred steps of a model it compiles kernels in
    the background and then decodes in CUDA graphs. Graphs run ahead of the reader: `step` may return no token at
    first, and several tokens of a request later. Requests with log-probabilities, penalties or biases are decoded
    with plain operations beside the graphs, in a second KV cache.
    """

    def __init__(
        self,
        model: GPT,
        *,
        slots: int = 32,
        chunk: int | None = None,
        prefix_tokens: int = 0,
        context_overflow: ContextOverflow = "slide",
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Prompts are read `chunk` tokens at a time, between the steps of the others.

        `prefix_tokens`: tokens of earlier requests whose keys and values are kept. A prompt that begins like one of
        them is read only from there on. `prefix_cache`: a cache from an earlier engine of this model, instead.
        `context_overflow`: see `ContextOverflow`. Raises ValueError for slots or chunk below 1, negative prefix_tokens
        and an unknown context_overflow.
        """
        if slots < 1 or (chunk is not None and chunk < 1):
            raise ValueError(f"slots and chunk must be at least 1, got {slots} and {chunk}")
        if prefix_tokens < 0:
            raise ValueError(f"prefix_tokens must be at least 0 (0: no prefix cache), got {prefix_tokens}")
        if context_overflow not in get_args(ContextOverflow):
            raise ValueError(f"context_overflow must be 'slide' or 'half', got {context_overflow!r}")
        self.model = model
        self.context_overflow = context_overflow
        self._half = context_overflow == "half"
        self._prefixes = PrefixCache(prefix_tokens) if prefix_cache is None else prefix_cache
        graphs = cuda_slots.acquire(model, slots)
        use_graphs = graphs is not None and graphs.ready and graphs.failure is None
        self._slots: Slots = graphs if graphs is not None and use_graphs else PlainSlots(model, slots)
        self._beside: PlainSlots | None = None  # for requests that graphs cannot decode
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
        self._full: list[Request] = []  # longer than T: half of the context is dropped when all tokens are received
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
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        pinned: int = 0,
    ) -> Request:
        """Queue a prompt. Its request ends after max_new_tokens, or with the first token that is in `stop`.

        The uniform draws are made now: from `generator`, or a new generator with this `seed`, or torch's default one.

        `logprobs`: each event has the log-probabilities of its tokens, and of this many alternatives.
        `prompt_logprobs`: `Request.prompt_logprobs` has those of the prompt, with as many alternatives.
        `presence_penalty`, `frequency_penalty`: subtracted from the logit of a token that is in the continuation, once
        and for each time. `logit_bias`: added to the logit of an id.
        `pinned`: first tokens of the prompt that stay when "half" drops a part of the context; at most T / 2 of them.

        Raises ValueError for an empty prompt, an id outside the vocabulary, max_new_tokens outside
        1..`config.MOST_TOKENS`, both a generator and a seed, penalties and biases that are not finite, logprobs outside
        0..V, and prompt_logprobs with a prompt longer than T.
        """
        V, T = self.model.config.V, self.model.config.T
        ids, number = check_prompt(prompt, V), check_new_tokens(max_new_tokens, 1)
        if prompt_logprobs and len(ids) > T:
            raise ValueError(f"prompt_logprobs needs a prompt of at most T={T} tokens, got {len(ids)}: shorten it")
        if generator is not None and seed is not None:
            raise ValueError("generator and seed exclude each other: give one of them")
        sampling = sampling or Sampling()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        if sampling.temperature == 0.0:
            uniform = torch.zeros(number, dtype=torch.float64)
        else:
            uniform = torch.rand(number, generator=generator, dtype=torch.float64)
        request = Request(
            ids,
            len(ids),
            number,
            sampling,
            frozenset(stop),
            uniform,
            logprobs=None if logprobs is None else check_int("logprobs", logprobs, 0, V),
            presence_penalty=check_penalty("presence_penalty", presence_penalty),
            frequency_penalty=check_penalty("frequency_penalty", frequency_penalty),
            logit_bias=check_logit_bias(logit_bias, V),
            wants_prompt_logprobs=prompt_logprobs,
            pinned=most_pinned(check_int("pinned", pinned, 0), len(ids), T),
        )
        if self._half and len(ids) > T:
            request.drop_older_half(T)
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
            unfinished = self._reading or self._inside or self._outside or self._full
            return bool(self._waiting or unfinished or self._launches)

    @property
    def next_tokens(self) -> tuple[int, int]:
        """How many tokens of prompts the next step reads, at most, and of how many requests it decodes a token."""
        with self._lock:
            unread = sum(request.unread for request in (*self._reading, *self._waiting, *self._full))
        return min(unread, self._chunk), len(self._inside) + len(self._outside)

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
            launched = self._launch(self._slots)
            beside = [] if self._beside is None else self._launch(self._beside)
        if launched:
            self._launches.append(launched)
        events = [event for pending in beside for event in self._receive(pending)]
        if self._launches and (len(self._launches) > self._slots.max_pending or not launched):
            events += [event for pending in self._launches.popleft() for event in self._receive(pending)]
        return events

    def wait_until_ready(self) -> None:
        """Wait until the kernels are compiled, so that every token uses them. For a server that starts."""
        if self._graphs_later:
            self._graphs, self._graphs_later = cuda_slots.acquire(self.model, self._num_slots, force=True), False
        if self._graphs is not None:
            self._graphs.wait_until_ready()

    def close(self, *, keep: bool = True) -> None:
        """End all requests. `keep` the captured graphs and their memory for the model's next engine."""
        with self._lock:
            for request in [*self._waiting, *self._reading, *self._inside, *self._outside, *self._full]:
                self._end(request, "cancelled")
            for pending in (pending for launched in self._launches for pending in launched):
                for request in pending.requests:
                    request.finished = request.finished or "cancelled"
            self._launches.clear()
        for slots in (self._slots, self._beside, self._graphs):
            if slots is not None:
                slots.release(keep=keep)

    def _switch_to_graphs(self) -> None:
        """Replace plain slots, which have nothing pending between steps, by graphs; these read all prompts again."""
        assert self._graphs is not None and isinstance(self._slots, PlainSlots)
        if self._graphs.failure is not None:
            warnings.warn(f"decoding without compiled kernels: {self._graphs.failure}", stacklevel=3)
        else:
            everyone = [*self._inside, *self._outside, *self._reading, *self._full]
            moved = [r for r in everyone if r.simple and r not in self._full]
            for request in moved:
                self._slots.drop(request)
                request.read = request.loaded = 0
            self._beside = None if len(moved) == len(everyone) else self._slots
            self._slots = self._graphs
            self._chunk = self._requested_chunk or self._slots.chunk
            self._reading = deque([*moved, *(r for r in self._reading if not r.simple)])
            self._inside = [r for r in self._inside if not r.simple]
            self._outside = [r for r in self._outside if not r.simple]
        self._graphs = None

    def _slots_of(self, request: Request) -> Slots:
        """The slots that decode a request."""
        if request.simple or isinstance(self._slots, PlainSlots):
            return self._slots
        if self._beside is None:
            self._beside = PlainSlots(self.model, self._num_slots)
        return self._beside

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
        if request in self._inside:
            self._store(request)
        for queue in (self._reading, self._inside, self._outside, self._full):
            if request in queue:
                queue.remove(request)
        self._slots_of(request).drop(request)
        self._free.append(request.slot)

    def _read(self) -> None:
        """Read a chunk of the oldest unread prompt, together with the short prompts that follow it."""
        if self._full:
            self._drop_older_halves()
        while self._reading:
            first = self._reading[0]
            self._load_prefix(first)
            if first.length <= self.model.config.T and first.unread:
                break
            self._start(self._reading.popleft())  # nothing to read
        else:
            return
        group = self._group() if first.read == first.loaded and first.unread <= self._chunk else [first]
        self._slots_of(first).read(group, min(max(request.unread for request in group), self._chunk))
        for request in group:
            request.read += min(request.unread, self._chunk)
            if not request.unread:
                self._reading.popleft()
                self._start(request)

    def _drop_older_halves(self) -> None:
        """Shorten the contexts that are full, if all their tokens have been received, and queue them for reading."""
        for request in [request for request in self._full if request.received == request.launched]:
            self._full.remove(request)
            request.drop_older_half(self.model.config.T)
            self._reading.appendleft(request)

    def _group(self) -> list[Request]:
        """Return the first request and those after it whose unread tokens together fit into one chunk."""
        T, (first, *others) = self.model.config.T, self._reading
        group, number, end = [first], first.unread, first.read
        for request in others:
            if request.length > T or self._slots_of(request) is not self._slots_of(first):
                break
            self._load_prefix(request)
            number, end = max(number, request.unread), max(end, request.read)
            fits = number * (len(group) + 1) <= self._chunk and end + number <= T  # shorter rows are padded
            if not fits or not request.unread or self._shares(request, group):
                break
            group.append(request)
        return group

    def _shares(self, request: Request, group: list[Request]) -> bool:
        """Whether the prefix cache will have much more of a request when the group has been read."""
        if not self._prefixes.limit:
            return False
        return any(common_length(other.context, request.context) >= request.read + WORTH_WAITING for other in group)

    def _load_prefix(self, request: Request) -> None:
        """Take the longest stored prefix of a request, of which nothing has been read, from the prefix cache."""
        if not self._prefixes.limit or request.read > request.loaded or request.length > self.model.config.T:
            return
        self._prefixes.check_weights(self.model)
        found, parts = self._prefixes.match(request.context[:-1])
        if found > request.loaded:
            self._slots_of(request).load(request, parts)
            request.read = request.loaded = found
            if not request.launched:
                request.cached = found

    def _store(self, request: Request) -> None:
        """Store the known tokens of a request, which is in its slot, in the prefix cache."""
        slots = self._slots_of(request)
        if self._prefixes.limit and (slots.exact or request.launched == 0):
            # The last known token has keys if another was launched from it; that of position T - 1 is never needed.
            known = request.length - (request.launched == request.received)
            ids = request.context[: min(known, self.model.config.T - 1)]
            self._prefixes.insert(ids, lambda start, end: slots.keys_and_values(request, start, end))

    def _start(self, request: Request) -> None:
        outside = request.length > self.model.config.T
        (self._outside if outside else self._inside).append(request)
        self._slots_of(request).start(request)
        if request.wants_prompt_logprobs and request.prompt_logprobs is None:
            prompt = request.ids[: request.prompt_length]
            request.prompt_logprobs = score_prompt(self.model, prompt, request.logprobs or 0)
        if not outside:
            self._store(request)

    def _launch(self, slots: Slots) -> list[PendingTokens]:
        """Launch one token or more for every started request in these slots."""
        T = self.model.config.T
        outside = [request for request in self._outside if self._slots_of(request) is slots]
        window = slots.window(outside) if outside else None
        launched = [pending for pending in (slots.decode(), window) if pending is not None]
        for pending in launched:
            for request, count in zip(pending.requests, pending.counts, strict=True):
                request.launched += count
                done = request.launched == request.max_new_tokens
                length = request.prompt_length + request.launched - request.dropped
                if request in self._inside and (done or length > T):
                    self._store(request)
                    self._inside.remove(request)
                    slots.drop(request)
                    if not done:
                        (self._full if self._half else self._outside).append(request)
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
            if request.penalized:
                request.counts.update(tokens)
            if request.sampling.penalized:
                request.seen.update(tokens)
            if reason is None and request.received == request.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._end(request, reason)
            events.append(Event(request, tokens, reason, pending.logprobs.get(request)))
        return events
