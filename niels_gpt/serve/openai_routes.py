"""OpenAI's API: models, chat completions, completions and embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from niels_gpt.serve.completions import Order
from niels_gpt.serve.errors import ERRORS, APIError
from niels_gpt.serve.openai_responses import ChatFormat, CompletionFormat
from niels_gpt.serve.openai_schema import ChatRequest, CompletionRequest, EmbeddingRequest, as_prompts
from niels_gpt.serve.records import record_of
from niels_gpt.serve.requests import (
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
    order = Order(
        [prompt.ids],
        body.most_tokens or min(model.context, limits.new_tokens),
        body.sampling,
        body.n or 1,
        [*body.stops, *model.format.stops],
        body.seed,
        {**body.engine_options, "pinned": prompt.pinned},
    )
    return await respond(request, model, order, partial(ChatFormat, model, body), stream=bool(body.stream))


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue texts, or lists of token ids."""
    model, given = find_model(request, body.model), as_prompts(body.prompt)
    prompts = await encode_texts(given, model, limits_of(request), "prompt")
    wanted = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    options = body.engine_options
    if body.scores is not None and body.echo:
        options["prompt_logprobs"] = True
    order = Order(
        prompts,
        wanted or 1,
        body.sampling,
        body.n or 1,
        body.stops,
        body.seed,
        options,
        prompts_only=wanted == 0,
    )
    return await respond(request, model, order, partial(CompletionFormat, model, body, given), stream=bool(body.stream))


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


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
