"""What the routes share: the model and the limits of a request, its texts as ids, calls of the model, responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from niels_gpt.chat.format import ChatPrompt
from niels_gpt.chat.untrusted import encode_untrusted
from niels_gpt.serve.access_log import record_of
from niels_gpt.serve.completions import MODEL_FAILURES, Generation, Order, Update, model_failed
from niels_gpt.serve.errors import CLIENT_CLOSED, APIError
from niels_gpt.serve.event_stream import EventStream, watch_client
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.openai_responses import ResponseFormat
from niels_gpt.serve.openai_schema import ChatMessage
from niels_gpt.serve.served_model import ServedModel

IN_THREAD = 8192
"""Texts of more characters are tokenized in a thread, so that other streams go on."""
BYTES_PER_TURN = 64
"""A turn without text takes as long as so many bytes."""

R = TypeVar("R")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in {
        400: "A parameter is wrong or not supported.",
        401: "The API key is missing or wrong.",
        403: "The Host or Origin header is of another site.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full; the header Retry-After says when to try again.",
        500: "The model failed.",
        503: "The server is shutting down.",
        504: "The request took too long.",
    }.items()
}


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

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        call.cancel()

    watching = asyncio.create_task(watch())
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
    include_usage: bool,
) -> Response:
    """Generate, and return the response or its stream."""
    prompt_tokens = sum(map(len, order.prompts))
    generation = Generation(model, order, limits_of(request), record_of(request.scope))
    generations: set[Generation] = request.app.state.generations
    generations.add(generation)
    generation.on_close = lambda: generations.discard(generation)
    watch = watch_client(request.receive, generation)
    updates = generation.updates()
    try:
        first = await anext(updates)
        form = make_form(generation)
        if stream:
            return EventStream(
                first,
                updates,
                generation,
                form,
                prompt_tokens=prompt_tokens,
                include_usage=include_usage,
                watch=watch,
            )
        merged = [Update(choice.index, "", [], None) for choice in generation.choices]
        batch: list[Update] | None = first
        while batch is not None:
            for update in batch:
                old = merged[update.choice]
                merged[update.choice] = Update(
                    update.choice, old.text + update.text, old.tokens + update.tokens, update.finished
                )
            batch = await anext(updates, None)
        generation.close()
        watch.cancel()
        usage = generation.usage(prompt_tokens)
        return await json_response(
            lambda: form.whole(merged, usage), in_thread=order.options.get("logprobs") is not None
        )
    except BaseException:
        watch.cancel()
        generation.close()
        raise


async def json_response(build: Callable[[], Any], *, in_thread: bool) -> Response:
    """Return what a function builds as JSON: that of scored tokens in a thread, since they can be many megabytes."""

    def response() -> Response:
        return JSONResponse(build())

    return await asyncio.to_thread(response) if in_thread else response()


def check_bytes(texts: Any, limits: Limits, param: str) -> int:
    """Return the size of texts in bytes. Raises APIError 400 above the limit."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > limits.prompt_bytes:
        raise APIError(
            400,
            f"{param} has {size} bytes of text, more than {limits.prompt_bytes}, the limit of this server",
            param=param,
            code="context_length_exceeded",
        )
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
            raise APIError(
                400,
                f"{param} has {len(ids)} tokens, more than {limits.prompt_tokens}, the limit of this server",
                param=param,
                code="context_length_exceeded",
            )
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
