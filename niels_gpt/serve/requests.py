"""What the routes share: the model and the limits of a request, its texts as ids, calls of the model, responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from niels_gpt.chat.format import ChatPrompt
from niels_gpt.chat.untrusted import encode_untrusted
from niels_gpt.serve.completions import MODEL_FAILURES, Generation, Order, Update, model_failed
from niels_gpt.serve.errors import CLIENT_CLOSED, APIError, above_limit
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.openai_responses import ResponseFormat
from niels_gpt.serve.openai_schema import ChatMessage
from niels_gpt.serve.records import record_of
from niels_gpt.serve.served_model import ServedModel

IN_THREAD = 8192
"""Texts of more characters are tokenized in a thread, so that other streams go on."""
BYTES_PER_TURN = 64
"""A turn without text takes as long as so many bytes."""

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

R = TypeVar("R")


def limits_of(request: Request) -> Limits:
    """The limits of the server."""
    limits: Limits = request.app.state.limits
    return limits


def find_model(request: Request, name: str) -> ServedModel:
    """Return the model with this id or alias. Raises APIError 404."""
    models: Mapping[str, ServedModel] = request.app.state.models
    found = models.get(name) or next((model for model in models.values() if name in model.aliases), None)
    if found is None:
        known = ", ".join(models)
        raise APIError(
            404, f"there is no model {name[:100]!r}; this server has {known}", param="model", code="model_not_found"
        )
    return found


def check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise APIError 400 for ids that the model cannot read at once: none, too many, or outside its vocabulary."""
    if not ids:
        raise APIError(400, f"{param} is empty: give at least one character", param=param)
    if len(ids) > model.context:
        raise APIError(
            400,
            f"{param} has {len(ids)} tokens, more than {model.context}, the context of {model.id}",
            param=param,
            code="context_length_exceeded",
        )
    if max(ids) >= model.vocabulary:
        raise APIError(400, f"{param} has the id {max(ids)}; {model.id} has {model.vocabulary} ids", param=param)


async def call_model(request: Request, model: ServedModel, function: Callable[[], R]) -> R:
    """Run a function of a model in its thread, between two steps.

    Raises APIError: 429 if the queue is full, 500 if the model fails, 504 if it takes too long, CLIENT_CLOSED if the
    client goes away.
    """
    limits = limits_of(request)
    since = model.admission.admit(1)
    call = asyncio.ensure_future(model.worker.call(function))

    watching = on_disconnect(request.receive, call.cancel)
    left = record_of(request.scope).began + limits.request_seconds - time.monotonic()
    try:
        return await asyncio.wait_for(call, max(0.0, left))
    except TimeoutError:
        raise APIError(504, f"the request took longer than {limits.request_seconds:g} s", code="timeout") from None
    except MODEL_FAILURES as err:
        raise model_failed(model, err) from err
    except asyncio.CancelledError:
        if watching.done():
            record_of(request.scope).outcome = "disconnect"
            raise APIError(CLIENT_CLOSED, "the client closed the connection") from None
        raise
    finally:
        watching.cancel()
        model.admission.leave(1, since)


async def respond(
    request: Request,
    model: ServedModel,
    order: Order,
    make_form: Callable[[Generation], ResponseFormat],
    *,
    stream: bool,
) -> Response:
    """Generate, and return the response or its stream."""
    generation = Generation(model, order, limits_of(request), record_of(request.scope))
    generations: set[Generation] = request.app.state.generations
    generations.add(generation)
    gone = APIError(CLIENT_CLOSED, "the client closed the connection")
    watch = on_disconnect(request.receive, lambda: generation.stop(gone, "disconnect"))

    def closed() -> None:
        generations.discard(generation)
        watch.cancel()

    generation.on_close = closed
    updates = generation.updates()
    try:
        first = await anext(updates)
        form = make_form(generation)
        if stream:
            return EventStream(first, updates, generation, form)
        merged = [Update(choice.index, "", [], None) for choice in generation.choices]
        batch: list[Update] | None = first
        while batch is not None:
            for update in batch:
                merged[update.choice] = merged[update.choice].joined(update)
            batch = await anext(updates, None)
        in_thread = order.options.get("logprobs") is not None
        response = await json_response(lambda: form.whole(merged, generation.usage()), in_thread=in_thread)
        response.headers.update(generation.headers)
        return response
    except BaseException:
        generation.close()
        raise


def on_disconnect(receive: Receive, end: Callable[[], object]) -> asyncio.Task[None]:
    """Return a task that calls a function as soon as the client goes away. Cancel it after the response."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end()

    return asyncio.create_task(watch())


class EventStream(Response):
    """The updates of a generation. The first of them has been read, so that an error before it has its own status."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[Update],
        updates: AsyncIterator[list[Update]],
        generation: Generation,
        form: ResponseFormat,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **generation.headers})
        del self.headers["content-length"]
        self._first = first
        self._updates = updates
        self._generation = generation
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(chunks: list[dict[str, Any]], end: str = "") -> None:
            text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
            if text:
                await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": not end})

        async def write_updates(updates: list[Update]) -> None:
            await write([chunk for update in updates for chunk in self._form.chunks(update)])

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write_updates(self._first)
            try:
                async for updates in self._updates:
                    await write_updates(updates)
            except APIError as err:
                last = [err.body] if err.status != CLIENT_CLOSED else []
            else:
                last = self._form.end(self._generation.usage())
            await write(last, "data: [DONE]\n\n")
        finally:
            self._generation.close()


async def json_response(build: Callable[[], Any], *, in_thread: bool) -> Response:
    """Return what a function builds as JSON: that of scored tokens in a thread, since they can be many megabytes."""

    def response() -> Response:
        return JSONResponse(build())

    return await asyncio.to_thread(response) if in_thread else response()


def check_bytes(texts: Any, limits: Limits, param: str) -> int:
    """Return the size of texts in bytes. Raises APIError 400 above the limit."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > limits.prompt_bytes:
        what = f"{param} has {size} bytes of text"
        raise above_limit(what, limits.prompt_bytes, param=param, code="context_length_exceeded")
    return size


async def encode_texts(
    given: Sequence[str | list[int]], model: ServedModel, limits: Limits, param: str
) -> list[Sequence[int]]:
    """Return the ids of each prompt. Special strings in it are text. Raises APIError 400."""
    size = check_bytes((text for text in given if isinstance(text, str)), limits, param)
    as_text, start = model.tokenizer.encode_as_text, model.tokenizer.document_start
    prompts: list[Sequence[int]] = await _encode(
        size, lambda: [[*start, *as_text(prompt)] if isinstance(prompt, str) else prompt for prompt in given], param
    )
    for text, ids in zip(given, prompts, strict=True):
        if not ids or not text:
            raise APIError(400, f"{param} is empty: give at least one character", param=param)
        if len(ids) > limits.prompt_tokens:
            what = f"{param} has {len(ids)} tokens"
            raise above_limit(what, limits.prompt_tokens, param=param, code="context_length_exceeded")
    return prompts


async def encode_messages(
    messages: Sequence[ChatMessage], model: ServedModel, limits: Limits, *, continue_last: bool = False
) -> ChatPrompt:
    """Return the prompt of a conversation, of which the latest turns fit the context. Raises APIError 400."""
    turns = [message.as_turn() for message in messages]
    size = check_bytes((turn["content"] for turn in turns), limits, "messages") + BYTES_PER_TURN * len(turns)
    most = 3 * model.context // 4
    return await _encode(
        size, lambda: encode_untrusted(turns, model.tokenizer, most, continue_last=continue_last), "messages"
    )


async def _encode(size: int, function: Callable[[], R], param: str) -> R:
    """Tokenize texts of about this many bytes, in a thread if they are long. Raises APIError 400 if one is refused."""
    try:
        return function() if size <= IN_THREAD else await asyncio.to_thread(function)
    except ValueError as err:
        raise APIError(400, str(err), param=param) from None
