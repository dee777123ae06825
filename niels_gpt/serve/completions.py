"""The continuations of one HTTP request: submitted together, read as text, ended together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from niels_gpt.inference.engine.request import Event, Request
from niels_gpt.inference.generation import TextOutput, encode_stops
from niels_gpt.inference.sampling import Sampling
from niels_gpt.serve.errors import APIError, above_limit
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.model_worker import Inbox
from niels_gpt.serve.openai_schema import NO_LIMIT
from niels_gpt.serve.records import Record
from niels_gpt.serve.served_model import ServedModel
from niels_gpt.system.rng import derive_seed

MODEL_FAILURES = (ArithmeticError, MemoryError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Order:
    """What to generate: `n` continuations of each prompt."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    """Longest continuation; the limit of the server if it is smaller, or for NO_LIMIT."""
    sampling: Sampling
    n: int = 1
    stops: Sequence[str] = ()
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `Engine.submit`."""
    start: Sequence[int] = ()
    """The last ids of the prompts, where they are already text of the continuation; a stop sequence can begin there."""
    prompts_only: bool = False
    """Whether only the prompts are wanted. The engine always samples a token; it is dropped (`new_tokens` is 1)."""

    @property
    def choices(self) -> int:
        """Number of continuations."""
        return len(self.prompts) * self.n


class ScoredToken(NamedTuple):
    """A token of a continuation, with its log-probabilities as the engine reports them."""

    start: int
    """Position of its first byte in the continuation."""
    end: int
    token: int
    logprobs: Any


class Update(NamedTuple):
    """What is new in a continuation: text that is certain, tokens if they are scored, and the reason of its end."""

    choice: int
    text: str
    tokens: list[ScoredToken]
    finished: str | None

    def joined(self, later: Update) -> Update:
        """This update and a later one as one."""
        return Update(self.choice, self.text + later.text, self.tokens + later.tokens, later.finished)


class _Choice:
    """One continuation as text."""

    def __init__(self, index: int, request: Request, stops: list[bytes], model: ServedModel, order: Order) -> None:
        self.index = index
        self.request = request
        self.tokens = 0
        self.finished: str | None = None
        self._model = model
        self._output = TextOutput(stops)
        self._has_stops = bool(stops)
        self._prompt_only = order.prompts_only
        before = b"".join(model.token_bytes[token] for token in order.start)
        self._output.add(before)
        self._size = len(before)  # bytes so far
        self._scored: list[ScoredToken] = []  # their text is not certain yet

    @property
    def certain(self) -> int:
        """Bytes of text that are certain, with those of the start."""
        return self._output.certain

    def add(self, event: Event) -> Update:
        """Add new tokens. A stop sequence ends the continuation here; the engine does not know of it yet."""
        if self._prompt_only:
            self.finished = "length"
            return Update(self.index, "", [], self.finished)
        token_bytes, tokens = self._model.token_bytes, event.tokens
        ends = event.finished == "stop"  # with an id that is not text
        self.tokens += len(tokens)
        text = ""
        if self._output.stopped:  # by the start
            self.finished = "stop"
        elif event.logprobs is None and not self._has_stops:
            text = self._output.add(b"".join([token_bytes[token] for token in (tokens[:-1] if ends else tokens)]))
        else:
            for number, token in enumerate(tokens[:-1] if ends else tokens):
                data = token_bytes[token]
                if event.logprobs is not None:
                    self._scored.append(ScoredToken(self._size, self._size + len(data), token, event.logprobs[number]))
                self._size += len(data)
                text += self._output.add(data)
                if self._output.stopped:
                    self.finished = "stop"
                    self.tokens -= len(tokens) - number - 1
                    break
        if self.finished is None and event.finished is not None:
            self.finished = event.finished
        if self.finished is not None:
            text += self._output.flush()
        return Update(self.index, text, self._certain_tokens(), self.finished)

    def _certain_tokens(self) -> list[ScoredToken]:
        certain = self._output.certain
        if self.finished is not None:  # of the token in which a stop sequence begins, a part is text
            tokens = [each for each in self._scored if each.start < certain or not self._output.stopped]
            self._scored = []
            return tokens
        size = len(self._scored)
        while size and self._scored[size - 1].end > certain:
            size -= 1
        tokens, self._scored = self._scored[:size], self._scored[size:]
        return tokens


class Generation:
    """The continuations of one HTTP request. Whatever ends it early (`stop`) frees its slots at once."""

    def __init__(self, model: ServedModel, order: Order, limits: Limits, record: Record) -> None:
        """Submit the continuations. Raises APIError 400 for what the engine refuses, 429 if the queue is full."""
        cut = order.new_tokens == NO_LIMIT or order.new_tokens > limits.new_tokens
        new_tokens = limits.new_tokens if cut else order.new_tokens
        self.headers = {"x-max-tokens": str(new_tokens)} if cut else {}
        if order.choices > limits.choices:
            raise above_limit(f"the request asks for {order.choices} continuations", limits.choices, param="n")
        alternatives = order.choices * new_tokens * (order.options.get("logprobs") or 0)
        if alternatives > limits.alternatives:
            what = f"{alternatives} alternatives (continuations times max_tokens times top_logprobs)"
            raise above_limit(f"the request asks for {what}", limits.alternatives, param="top_logprobs")
        self._model = model
        self._record = record
        self._inbox = Inbox()
        self._admitted = model.admission.admit(order.choices)
        self._open = True
        self.order = order
        self.on_close: Callable[[], object] = lambda: None
        too_long = APIError(
            504, f"the request took longer than {limits.request_seconds:g} s, the limit of this server", code="timeout"
        )
        left = max(0.0, record.began + limits.request_seconds - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left, self.stop, too_long, "timeout")
        self.choices: list[_Choice] = []
        stops = encode_stops(list(order.stops))
        try:
            for index in range(order.choices):
                request = model.worker.submit(
                    self._inbox,
                    order.prompts[index // order.n],
                    max_new_tokens=new_tokens,
                    sampling=order.sampling,
                    seed=_choice_seed(order.seed, index % order.n),
                    stop=model.end_ids,
                    **order.options,
                )
                self.choices.append(_Choice(index, request, stops, model, order))
        except ValueError as err:
            self.close()
            raise APIError(400, str(err), code="invalid_value") from None
        self._by_request = {choice.request: choice for choice in self.choices}
        record.model = model.id
        record.prompt_tokens = sum(map(len, order.prompts))

    def stop(self, err: APIError, outcome: str) -> None:
        """End the generation early; its reader gets this error."""
        if self._open and self._inbox.failure is None:
            self._record.outcome = outcome
            self._inbox.fail(err)
            self._cancel()

    def _cancel(self) -> None:
        for choice in self.choices:
            self._model.worker.cancel(choice.request)

    def close(self) -> None:
        """Free the slots. Nothing happens if it was closed before."""
        if self._open:
            self._open = False
            self._timer.cancel()
            self._cancel()
            self._model.admission.leave(self.order.choices, self._admitted)
            self._record.completion_tokens = self._completion_tokens()
            self.on_close()

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield what is new, at most one update per continuation, until all have ended; then close.

        Raises APIError if the generation was stopped (also because it took too long), or the model failed.
        """
        unfinished = len(self.choices)
        try:
            while unfinished:
                events = await self._inbox.take()
                if self._record.first_token is None:
                    self._record.first_token = time.monotonic() - self._record.began
                    self._record.cached_tokens = self._cached_tokens()
                updates: dict[int, Update] = {}
                for event in events:
                    choice = self._by_request[event.request]
                    if choice.finished is not None:
                        continue  # tokens after a stop sequence
                    update = choice.add(event)
                    if update.finished is not None:
                        unfinished -= 1
                        self._model.worker.cancel(choice.request)
                    earlier = updates.get(update.choice)
                    # There is an earlier one if the reader is slower than the model.
                    updates[update.choice] = update if earlier is None else earlier.joined(update)
                if updates:
                    yield list(updates.values())
        except APIError:
            raise
        except MODEL_FAILURES as err:
            self._record.outcome = "error"
            raise model_failed(self._model, err) from err
        finally:
            self.close()

    def _cached_tokens(self) -> int:
        return sum(choice.request.cached for choice in self.choices[:: self.order.n])

    def _completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """The tokens so far, in OpenAI's words."""
        prompt_tokens, completion = self._record.prompt_tokens, self._completion_tokens()
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }


def model_failed(model: ServedModel, err: Exception) -> APIError:
    """Return the error of a model with broken weights, or without memory."""
    return APIError(500, f"the model {model.id} failed: {err}", code="model_failed")


def _choice_seed(seed: int | None, number: int) -> int | None:
    """The first continuation has the seed itself, so that n = 1 is the first of n = 2."""
    return seed if seed is None or number == 0 else derive_seed(seed, "choice", number)
