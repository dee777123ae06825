"""A response of server-sent events, one per chunk, which ends its generation whatever happens to the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from niels_gpt.serve.completions import Generation, Update
from niels_gpt.serve.errors import CLIENT_CLOSED, APIError
from niels_gpt.serve.openai_responses import ResponseFormat

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def watch_client(receive: Receive, generation: Generation) -> asyncio.Task[None]:
    """Return a task that stops the generation as soon as the client goes away. Cancel it after the response."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.stop(APIError(CLIENT_CLOSED, "the client closed the connection"), "disconnect")

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
        *,
        prompt_tokens: int,
        include_usage: bool,
        watch: asyncio.Task[None],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._updates = updates
        self._generation = generation
        self._form = form
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        self._watch = watch

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
            last = []
            try:
                async for updates in self._updates:
                    await write_updates(updates)
            except APIError as err:
                if err.status != CLIENT_CLOSED:
                    last.append(err.body)
            else:
                if self._include_usage:
                    last.append(self._form.end(self._generation.usage(self._prompt_tokens)))
            await write(last, "data: [DONE]\n\n")
        finally:
            self._watch.cancel()
            self._generation.close()
