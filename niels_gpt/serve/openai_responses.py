"""Responses in the shape of OpenAI's API: whole, and in the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from niels_gpt.serve.completions import ScoredToken, Update
from niels_gpt.serve.served_model import ServedModel

LEAST_LOGPROB = -9999.0
"""Reported for a probability of 0, whose logarithm JSON cannot hold."""


class ResponseFormat(Protocol):
    """How the updates of a generation become JSON."""

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The chunks of a stream for an update."""

    def end(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""

    def whole(self, updates: Sequence[Update], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The response that is not a stream, of one merged update per continuation."""


class _Format:
    def __init__(self, model: ServedModel, prefix: str, kind: str, include_usage: bool) -> None:
        self._model = model
        self._begun: set[int] = set()
        self._base = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": model.fingerprint,
        }
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def end(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._base, "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "choices": [choice], **self._usage}


class ChatFormat(_Format):
    """Replies to a conversation."""

    def __init__(self, model: ServedModel, *, stream: bool, scored: bool, include_usage: bool = False) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(model, "chatcmpl", kind, include_usage)
        self._scored = scored

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        chunks = []
        if update.choice not in self._begun:
            self._begun.add(update.choice)
            chunks.append(self._delta(update, {"role": "assistant", "content": ""}))
        if update.text or update.tokens:
            chunks.append(self._delta(update, {"content": update.text}, self._logprobs(update.tokens)))
        if update.finished is not None:
            chunks.append(self._delta(update, {}, finished=update.finished))
        return chunks

    def _delta(
        self, update: Update, delta: dict[str, Any], logprobs: Any = None, finished: str | None = None
    ) -> dict[str, Any]:
        return self._chunk({"index": update.choice, "delta": delta, "logprobs": logprobs, "finish_reason": finished})

    def whole(self, updates: Sequence[Update], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": update.choice,
                "message": {"role": "assistant", "content": update.text, "refusal": None},
                "logprobs": self._logprobs(update.tokens),
                "finish_reason": update.finished,
            }
            for update in updates
        ]
        return {**self._base, "choices": choices, "usage": usage}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        content = []
        for scored in tokens:
            found = scored.logprobs
            content.append(
                {
                    **token_json(self._model, found.token, found.logprob),
                    "top_logprobs": [token_json(self._model, token, logprob) for token, logprob in found.top],
                    "entropy": found.entropy,
                }
            )
        return {"content": content, "refusal": None}


class CompletionFormat(_Format):
    """Continuations of texts.

    echo: returns the prompt of a continuation as text and scored tokens; called with its first update, since the engine
    scores a prompt only when it has a slot.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        scored: bool,
        echo: Callable[[int], tuple[str, list[ScoredToken]]] | None = None,
        include_usage: bool = False,
    ) -> None:
        super().__init__(model, "cmpl", "text_completion", include_usage)
        self._scored = scored
        self._echo = echo
        self._offsets: dict[int, _Offsets] = {}

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(update))]

    def whole(self, updates: Sequence[Update], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._base, "choices": [self._choice(update) for update in updates], "usage": usage}

    def _choice(self, update: Update) -> dict[str, Any]:
        text, tokens = update.text, update.tokens
        if self._echo is not None and update.choice not in self._begun:
            self._begun.add(update.choice)
            prompt, prompt_tokens = self._echo(update.choice)
            text, tokens = prompt + text, [*prompt_tokens, *tokens]
        logprobs = self._logprobs(update.choice, tokens) if self._scored else None
        return {"index": update.choice, "text": text, "logprobs": logprobs, "finish_reason": update.finished}

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        offsets = self._offsets.setdefault(index, _Offsets())
        return {
            "tokens": [token_text(self._model, scored.token) for scored in tokens],
            "token_logprobs": [scored.logprobs and max(scored.logprobs.logprob, LEAST_LOGPROB) for scored in tokens],
            "top_logprobs": [
                scored.logprobs
                and {token_text(self._model, token): max(value, LEAST_LOGPROB) for token, value in scored.logprobs.top}
                for scored in tokens
            ],
            "text_offset": [offsets.add(self._model.token_bytes[scored.token]) for scored in tokens],
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


def token_json(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    """A token with its log-probability, as chat completions report it; `id` is an addition."""
    return {
        "token": token_text(model, token),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(model.token_bytes[token]),
        "id": token,
    }


def token_text(model: ServedModel, token: int) -> str:
    """The text of a token; one that is a part of a character is shown as `bytes:\\xf0\\x9f`."""
    if token in model.special_names:
        return model.special_names[token]
    data = model.token_bytes[token]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
