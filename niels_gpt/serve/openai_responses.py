"""Responses in the shape of OpenAI's API: whole, and in the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from niels_gpt.inference.logprobs import TokenLogprobs
from niels_gpt.serve.completions import Generation, ScoredToken, Update
from niels_gpt.serve.openai_schema import CompletionRequest, SampledRequest
from niels_gpt.serve.served_model import ServedModel

LEAST_LOGPROB = -9999.0
"""Reported for a probability of 0, whose logarithm JSON cannot hold."""


class ResponseFormat:
    """How the updates of a generation become JSON: of a response, or of the chunks of a stream."""

    prefix: str
    """Of the id."""
    kind: str
    """`object` of the response; `stream_kind` of a chunk."""
    stream_kind: str

    def __init__(self, model: ServedModel, body: SampledRequest, generation: Generation) -> None:
        self._model = model
        self._generation = generation
        self._scored = body.scores is not None
        self._include_usage = body.include_usage
        self._begun: set[int] = set()
        self._base = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.stream_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": model.fingerprint,
        }

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The chunks of a stream for an update."""
        usage = {"usage": None} if self._include_usage else {}
        return [{**self._base, "choices": [choice], **usage} for choice in self._streamed(update)]

    def end(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last chunk of a stream, if `include_usage` asks for one."""
        return [{**self._base, "choices": [], "usage": usage}] if self._include_usage else []

    def whole(self, updates: Sequence[Update], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The response that is not a stream, of one merged update per continuation."""
        return {**self._base, "choices": [self._choice(update) for update in updates], "usage": usage}

    def _choice(self, update: Update) -> dict[str, Any]:
        """A continuation in a response; here without its text."""
        return {"index": update.choice, "finish_reason": update.finished}

    def _streamed(self, update: Update) -> list[dict[str, Any]]:
        """What is new of a continuation in a stream."""
        return [self._choice(update)]

    def _begins(self, index: int) -> bool:
        """Whether this is the first update of a continuation."""
        begins = index not in self._begun
        self._begun.add(index)
        return begins


class ChatFormat(ResponseFormat):
    """Replies to a conversation."""

    prefix, kind, stream_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _streamed(self, update: Update) -> list[dict[str, Any]]:
        deltas: list[tuple[dict[str, Any], Any, str | None]] = []
        if self._begins(update.choice):
            deltas.append(({"role": "assistant", "content": ""}, None, None))
        if update.text or update.tokens:
            deltas.append(({"content": update.text}, self._logprobs(update.tokens), None))
        if update.finished is not None:
            deltas.append(({}, None, update.finished))
        return [
            {"index": update.choice, "delta": delta, "logprobs": logprobs, "finish_reason": finished}
            for delta, logprobs, finished in deltas
        ]

    def _choice(self, update: Update) -> dict[str, Any]:
        message = {"role": "assistant", "content": update.text, "refusal": None}
        return {**super()._choice(update), "message": message, "logprobs": self._logprobs(update.tokens)}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        content = [scored_json(self._model, scored.logprobs, alternatives="top_logprobs") for scored in tokens]
        return {"content": content, "refusal": None}


class CompletionFormat(ResponseFormat):
    """Continuations of texts. With `echo` each begins with its prompt, which has been scored by its first update."""

    prefix, kind, stream_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        given: Sequence[str | list[int]],
        generation: Generation,
    ) -> None:
        """given: the prompts as in the request."""
        super().__init__(model, body, generation)
        self._echoed = given if body.echo else None
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    def _choice(self, update: Update) -> dict[str, Any]:
        text, tokens = update.text, update.tokens
        if self._echoed is not None and self._begins(update.choice):
            order = self._generation.order
            prompt, ids = self._echoed[update.choice // order.n], order.prompts[update.choice // order.n]
            text = (prompt if isinstance(prompt, str) else self._model.tokenizer.decode(ids)) + text
            found = [None, *(self._generation.choices[update.choice].request.prompt_logprobs or [])]
            tokens = [*(ScoredToken(0, 0, i, each) for i, each in zip(ids, found, strict=False)), *tokens]
        logprobs = self._logprobs(update.choice, tokens) if self._scored else None
        return {**super()._choice(update), "text": text, "logprobs": logprobs}

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        model, offsets = self._model, self._offsets[index]
        return {
            "tokens": [token_text(model, scored.token) for scored in tokens],
            "token_logprobs": [scored.logprobs and max(scored.logprobs.logprob, LEAST_LOGPROB) for scored in tokens],
            "top_logprobs": [
                scored.logprobs
                and {token_text(model, token): max(value, LEAST_LOGPROB) for token, value in scored.logprobs.top}
                for scored in tokens
            ],
            "text_offset": [offsets.add(model.token_bytes[scored.token]) for scored in tokens],
        }


class _Offsets:
    """Counts the characters of a text while the bytes of its tokens arrive."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._complete = 0

    def add(self, data: bytes) -> int:
        """Return the position of the character in which a token begins."""
        self._complete += len(self._decoder.decode(data[:1]))
        is_part = bool(self._decoder.getstate()[0])  # of a character that is not complete
        position = self._complete - (0 if is_part or not data else 1)
        self._complete += len(self._decoder.decode(data[1:]))
        return position


def token_json(model: ServedModel, token: int) -> dict[str, Any]:
    """A token with its id, an addition to OpenAI's API, and the bytes of its text."""
    return {"id": token, "token": token_text(model, token), "bytes": list(model.token_bytes[token])}


def scored_json(model: ServedModel, scored: TokenLogprobs, *, alternatives: str) -> dict[str, Any]:
    """A token with its log-probability, those of other tokens, and the entropy."""
    found, *others = (
        {**token_json(model, token), "logprob": max(logprob, LEAST_LOGPROB)}
        for token, logprob in ((scored.token, scored.logprob), *scored.top)
    )
    return {**found, "entropy": scored.entropy, alternatives: others}


def token_text(model: ServedModel, token: int) -> str:
    """The text of a token; one that is a part of a character is shown as `bytes:\\xf0\\x9f`."""
    if token in model.special_names:
        return model.special_names[token]
    data = model.token_bytes[token]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
