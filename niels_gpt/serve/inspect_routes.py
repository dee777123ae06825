"""The API of the page for replies: a reply that begins with given ids, its tokens, attention, logit lens, provenance.

The ids of a prompt are always encoded here, from the messages or the text of the request, as for the first reply. So a
fork, and what the model saw at a token, follow from the same messages and the ids of the reply: exactly, not by text.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from starlette.responses import Response

from niels_gpt.chat.format import ChatPrompt
from niels_gpt.inference.inspection import attention, logit_lens, reply_logprobs, visible_context
from niels_gpt.inference.logprobs import TokenLogprobs
from niels_gpt.serve.completions import Generation, Order, Update
from niels_gpt.serve.errors import ERRORS, APIError, above_limit
from niels_gpt.serve.openai_responses import ResponseFormat, scored_json, token_json, token_text
from niels_gpt.serve.openai_schema import Id, Messages, Parameters, SamplingParameters, Text
from niels_gpt.serve.provenance_search import ProvenanceSearch
from niels_gpt.serve.records import record_of
from niels_gpt.serve.requests import (
    call_model,
    check_bytes,
    encode_messages,
    encode_texts,
    find_model,
    json_response,
    limits_of,
    respond,
)
from niels_gpt.serve.served_model import ServedModel

DIGITS = 6
"""Decimal places of attention weights and probabilities in a response."""

router = APIRouter(prefix="/api", responses=ERRORS)


class Inspected(Parameters):
    """A conversation or a text, and the ids of the reply to it, or of its continuation, so far."""

    model: Annotated[str, Field(max_length=300)]
    messages: Messages | None = None
    text: Text | None = Field(None, min_length=1, description="A text to continue, instead of messages.")
    reply: Annotated[list[Id], Field(fail_fast=True)] = Field(default_factory=list, max_length=2**18)
    started: int = Field(
        0, ge=0, description="So many ids of the reply were given when it was generated: 0, or where it was forked."
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Inspected:
        if (self.messages is None) == (self.text is None):
            raise ValueError("give either messages or text")
        if self.started > len(self.reply):
            raise ValueError(f"started must be at most {len(self.reply)}, the length of reply")
        return self


class ReplyRequest(Inspected, SamplingParameters):
    """The body of POST /api/reply. The reply begins with the ids of `reply`."""

    max_tokens: int = Field(256, ge=1)
    top_logprobs: int = Field(5, ge=0, le=20)


class TokensRequest(Inspected):
    """The body of POST /api/tokens."""

    top_logprobs: int = Field(5, ge=0, le=20)


class AttentionRequest(Inspected):
    """The body of POST /api/attention."""

    layer: int = Field(ge=0)
    head: int = Field(ge=0)


class LensRequest(Inspected):
    """The body of POST /api/logit_lens."""

    top: int = Field(5, ge=1, le=20)


class ProvenanceRequest(Parameters):
    """The body of POST /api/provenance."""

    model: Annotated[str, Field(max_length=300)]
    text: Text


class _Context(NamedTuple):
    """A request's model, and the ids of its prompt and reply."""

    model: ServedModel
    prompt: ChatPrompt
    reply: list[int]
    started: int

    @property
    def ids(self) -> list[int]:
        return [*self.prompt.ids, *self.reply]

    @property
    def given(self) -> int:
        """Number of ids that the engine was given when it generated the rest."""
        return len(self.prompt.ids) + self.started

    @property
    def visible(self) -> list[int]:
        """The ids from which the model chose the next token."""
        overflow = self.model.worker.engine.context_overflow
        return visible_context(
            self.ids, self.given, self.model.context, pinned=self.prompt.pinned, context_overflow=overflow
        )


@router.post("/reply")
async def stream_reply(body: ReplyRequest, request: Request) -> Response:
    """Stream a reply, or the rest of one, as events with tokens; each has its probability and alternatives.

    With the same seed, a reply that is continued from its first ids ends as it did before.
    """
    model, prompt, reply, _ = await _read(body, request)
    options: dict[str, Any] = {"logprobs": body.top_logprobs, "pinned": prompt.pinned}
    if body.seed is not None:
        generator = torch.Generator().manual_seed(body.seed)
        torch.rand(len(reply), generator=generator, dtype=torch.float64)  # the draws of the given ids
        options["generator"] = generator
    order = Order(
        [[*prompt.ids, *reply]],
        body.max_tokens,
        body.sampling,
        stops=model.format.stops if body.messages is not None else (),
        options=options,
        start=reply,
    )
    return await respond(request, model, order, partial(_ReplyEvents, model), stream=True)


class _ReplyEvents(ResponseFormat):
    """The events of /api/reply: `tokens`; at the end `finished` with the bytes that are text; then `usage`."""

    def __init__(self, model: ServedModel, generation: Generation) -> None:
        self._model = model
        self._generation = generation

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if update.tokens:
            chunks.append({"tokens": [_scored_json(self._model, scored.logprobs) for scored in update.tokens]})
        if update.finished is not None:
            chunks.append({"finished": update.finished, "bytes": self._generation.choices[0].certain})
        return chunks

    def end(self, usage: Any) -> list[dict[str, Any]]:
        return [{"usage": usage}]


@router.post("/tokens")
async def score_tokens(body: TokensRequest, request: Request) -> Response:
    """The tokens of a reply with their probabilities and alternatives, as when it was generated; null if unknown."""
    context = await _read(body, request)
    model = context.model
    if not context.reply:
        raise APIError(400, "reply is empty: give the ids of the reply", param="reply")
    score = partial(
        reply_logprobs,
        model.model,
        top=body.top_logprobs,
        pinned=context.prompt.pinned,
        context_overflow=model.worker.engine.context_overflow,
    )
    ids, given, length = context.ids, context.given, len(context.prompt.ids)
    # The ids that were given come from another reply to the same prompt.
    found = await call_model(request, model, lambda: [*score(ids[:given], length), *score(ids, given)])

    def build() -> dict[str, Any]:
        tokens = [
            token_json(model, token) if scored is None else _scored_json(model, scored)
            for token, scored in zip(context.reply, found, strict=True)
        ]
        return {"tokens": tokens}

    return await json_response(build, in_thread=True)


@router.post("/attention")
async def show_attention(body: AttentionRequest, request: Request) -> JSONResponse:
    """How much the last position reads from every position of the context, when it predicts the next token."""
    context = await _read(body, request)
    model, config, visible = context.model, context.model.model.config, context.visible
    for name, value, size in (("layer", body.layer, config.L), ("head", body.head, config.H)):
        if value >= size:
            raise APIError(400, f"{name} must be at most {size - 1}, got {value}: {model.id} has {size}", param=name)
    weights = await call_model(
        request, model, lambda: attention(model.model, visible, body.layer, body.head)[-1].tolist()
    )
    return JSONResponse(
        {
            "tokens": [token_json(model, i) for i in visible],
            "weights": [round(weight, DIGITS) for weight in weights],
            "dropped": len(context.ids) - len(visible),
        }
    )


@router.post("/logit_lens")
async def show_logit_lens(body: LensRequest, request: Request) -> JSONResponse:
    """What each layer would predict as the next token."""
    context = await _read(body, request)
    model, visible = context.model, context.visible
    top = min(body.top, model.vocabulary)
    found = await call_model(request, model, lambda: logit_lens(model.model, visible, len(visible) - 1, top))
    layers = [
        [{"id": i, "token": token_text(model, i), "probability": round(p, DIGITS)} for i, p in layer] for layer in found
    ]
    return JSONResponse({"layers": layers})


@router.post("/provenance")
async def find_provenance(body: ProvenanceRequest, request: Request) -> JSONResponse:
    """The passages of the training text that a text overlaps with verbatim.

    503 with the code index_building while the index of the training text is built: try again.
    """
    model, limits = find_model(request, body.model), limits_of(request)
    check_bytes([body.text], limits, "text")
    state = request.app.state
    if not hasattr(state, "provenance"):
        state.provenance = ProvenanceSearch(state.closing)
    return JSONResponse(await state.provenance.find(model, body.text))


async def _read(body: Inspected, request: Request) -> _Context:
    """Encode the prompt of a request. Raises APIError 400."""
    model, limits = find_model(request, body.model), limits_of(request)
    if body.messages is not None:
        prompt = await encode_messages(body.messages, model, limits)
    else:
        (ids,) = await encode_texts([body.text or ""], model, limits, "text")
        prompt = ChatPrompt(list(ids), 0)
    most = 2 * limits.new_tokens  # a fork can have as many ids before as after it
    if len(body.reply) > most:
        what = f"reply has {len(body.reply)} ids"
        raise above_limit(what, most, param="reply", code="context_length_exceeded")
    if body.reply and max(body.reply) >= model.vocabulary:
        raise APIError(400, f"reply has the id {max(body.reply)}; {model.id} has {model.vocabulary} ids", param="reply")
    record = record_of(request.scope)
    record.model, record.prompt_tokens = model.id, len(prompt.ids) + len(body.reply)
    return _Context(model, prompt, body.reply, body.started)


def _scored_json(model: ServedModel, scored: TokenLogprobs) -> dict[str, Any]:
    entropy = round(scored.entropy, DIGITS)
    return scored_json(model, scored._replace(entropy=entropy), alternatives="top")
