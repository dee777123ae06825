"""What one request may ask for, and how many may run at a time."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt.serve.errors import APIError, HTTPMiddleware


@dataclass(frozen=True)
class Limits:
    """Limits of a server; README of each in docs/serve.md."""

    slots: int = 32
    """Continuations that a model decodes at a time."""
    queue: int = 128
    """Continuations of a model that may wait for a slot; one more gets 429."""
    body_bytes: int = 4 * 2**20
    prompt_bytes: int = 2**20
    """Text of a prompt, or of all messages together, in utf-8."""
    prompt_tokens: int = 2**18
    new_tokens: int = 4096
    """Longest continuation."""
    choices: int = 32
    """Continuations (prompts times n) or embeddings of one request."""
    alternatives: int = 2**19
    """Log-probabilities of other tokens in one response: continuations times tokens times `top_logprobs`."""
    request_seconds: float = 300.0
    """From the start of a request to the end of its response, also in the queue."""
    body_seconds: float = 30.0
    """To send the body of a request."""
    head_seconds: float = 15.0
    """To send the headers of a request."""
    stall_seconds: float = 60.0
    """Without reading anything, while the buffer of the connection is full."""
    connections: int = 1000
    shutdown_seconds: float = 30.0
    """For running requests to end after SIGINT or SIGTERM."""


class Admission:
    """Counts the continuations of one model that run or wait, and estimates when the next one could start."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = 1.0  # of a continuation, as a moving average
        self.active = 0

    @property
    def waiting(self) -> int:
        """Continuations without a slot."""
        return max(0, self.active - self._limits.slots)

    def admit(self, number: int) -> float:
        """Count `number` more continuations and return the time.

        Raises APIError: 429 if the queue is too short now, 400 if it always is.
        """
        most = self._limits.slots + self._limits.queue
        if number > most:
            raise APIError(
                400,
                f"the request asks for {number} continuations, more than {most}, which this server runs and queues",
                param="n",
            )
        free = most - self.active
        if number > free:
            seconds = max(1, min(60, math.ceil(self._seconds * (1 + self.waiting / self._limits.slots))))
            raise APIError(
                429,
                f"the model is busy: {self.active} continuations run or wait, {number} more do not fit; "
                f"try again in {seconds} s",
                code="queue_full",
                retry_after=seconds,
            )
        self.active += number
        return time.monotonic()

    def leave(self, number: int, since: float) -> None:
        """Undo `admit`, which returned `since`."""
        self.active -= number
        self._seconds += 0.1 * (time.monotonic() - since - self._seconds)


class BodyLimit(HTTPMiddleware):
    """ASGI middleware that reads the body of a request, within its limits of size and time, before the app starts."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        super().__init__(app)
        self._limits = limits

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._read(scope, receive)
        except APIError as err:
            await err.send(send)
            return
        if body is None:
            return  # the client went away
        given = False

        async def receive_body() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        limit = self._limits.body_bytes
        too_large = APIError(
            413, f"the body is larger than {limit} bytes, the limit of this server", code="request_too_large"
        )
        most_read = 8 * limit  # smaller ones are read to their end, so that the client sees the response
        declared = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
        if declared > most_read:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if max(size, declared) <= limit:
                        chunks.append(message.get("body", b""))
                    elif size > most_read:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise APIError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout") from None
        if max(size, declared) > limit:
            raise too_large
        return b"".join(chunks)
