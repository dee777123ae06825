"""OpenAI's API: models, chat completions, completions and embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from niels_gpt.serve.access_log import record_of
from niels_gpt.serve.completions import Generation, Order, ScoredToken
from niels_gpt.serve.errors import APIError
from niels_gpt.serve.openai_responses import ChatFormat, CompletionFormat, ResponseFormat
from niels_gpt.serve.openai_schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    _Sampled,
    as_prompts,
)
from niels_gpt.serve.requests import (
    ERRORS,
    call_model,
    check_ids,
    encode_messages,
    encode_texts,
    find_model,
    limits_of,
    respond,
)
from niels_gpt.serve.served_model import ServedModel

COMPLETION_TOKENS = 16
"""Default `max_tokens` of /v1/completions, as OpenAI's."""
router = APIRouter(prefix="/v1", responses=ERRORS)


@router.get("/models")
async def list_models(request: Request) -> JSONResponse:
    """The loaded models."""
    models: Mapping[str, ServedModel] = request.app.state.models
    return JSONResponse({"object": "list", "data": [model.describe() for model in models.values()]})


@router.get("/models/{model_id}")
async def show_model(model_id: str, request: Request) -> JSONResponse:
    """One of the loaded models."""
    return JSONResponse(find_model(request, model_id).describe())


@router.post("/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Reply to a conversation."""
    model, limits = find_model(request, body.model), limits_of(request)
    prompt = await encode_messages(body.messages, model, limits, continue_last=body.continue_final_message)
    stops = [*body.stops, *model.format.stops]
    wanted = body.most_tokens or min(model.context, limits.new_tokens)
    options: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    options["pinned"] = prompt.pinned
    order = _order(body, [prompt.ids], wanted, stops, options)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    form = ChatFormat(model, stream=bool(body.stream), scored=bool(body.logprobs), include_usage=include_usage)
    return await respond(request, model, order, lambda _: form, stream=bool(body.stream), include_usage=include_usage)


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue texts, or lists of token ids."""
    model, limits = find_model(request, body.model), limits_of(request)
    given = as_prompts(body.prompt)
    prompts = await encode_texts(given, model, limits, "prompt")
    wanted = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    scored, echo = body.logprobs is not None, bool(body.echo)
    options: dict[str, Any] = {}
    if scored:
        options = {"logprobs": body.logprobs} | ({"prompt_logprobs": True} if echo else {})
    order = _order(body, prompts, wanted or 1, body.stops, options)
    order = replace(order, prompts_only=wanted == 0)
    include_usage = body.stream_options is not None and body.stream_options.include_usage

    def form(generation: Generation) -> ResponseFormat:
        def echoed(index: int) -> tuple[str, list[ScoredToken]]:
            prompt, ids = given[index // order.n], prompts[index // order.n]
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids)
            found = [None, *(generation.choices[index].request.prompt_logprobs or [])] if scored else []
            return text, [ScoredToken(0, i, each) for i, each in zip(ids, found, strict=False)]

        return CompletionFormat(model, scored=scored, echo=echoed if echo else None, include_usage=include_usage)

    return await respond(request, model, order, form, stream=bool(body.stream), include_usage=include_usage)


@router.post("/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The mean of the last hidden states of a text, not normalized. Small GPTs are not trained for this."""
    from niels_gpt.inference.inspection import embedding

    model, limits = find_model(request, body.model), limits_of(request)
    width = model.model.config.C
    if body.dimensions not in (None, width):
        raise APIError(400, f"dimensions must be {width}, the width of {model.id}", param="dimensions")
    prompts = await encode_texts(as_prompts(body.input), model, limits, "input")
    for ids in prompts:
        check_ids(ids, model, "input")
    if len(prompts) > limits.choices:
        raise APIError(400, f"{len(prompts)} inputs are more than {limits.choices}, the limit of this server")
    record = record_of(request.scope)
    record.model, record.prompt_tokens = model.id, sum(map(len, prompts))
    vectors: list[list[float]] = []
    for ids in prompts:
        vectors.append((await call_model(request, model, partial(embedding, model.model, ids))).tolist())
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": vector if body.encoding_format != "base64" else _base64(vector),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.id, "usage": usage})


def _order(
    body: _Sampled,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stops: Sequence[str],
    options: Mapping[str, Any],
) -> Order:
    given = {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
    }
    return Order(
        prompts,
        new_tokens,
        body.sampling,
        body.n or 1,
        stops,
        body.seed,
        {**options, **{name: value for name, value in given.items() if value}},
    )


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
