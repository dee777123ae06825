"""A plain server for comparison: FastAPI, and one `generate` of transformers in a thread per request.

python -m bench.transformers_server v0 256
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
from collections.abc import Iterator

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers.generation.streamers import BaseStreamer

from bench import models


class Ask(BaseModel):
    model: str
    prompt: str
    max_tokens: int
    temperature: float
    stream: bool
    stream_options: dict[str, bool]


class Tokens(BaseStreamer):
    """Hands the tokens of `generate` to the thread that writes the response."""

    def __init__(self) -> None:
        import queue

        self.queue: queue.Queue[list[int] | None] = queue.Queue()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.queue.put(value.tolist())
        self._prompt = False

    def end(self) -> None:
        self.queue.put(None)


def create(size: models.Size) -> FastAPI:
    torch.manual_seed(0)
    model = models.PEERS["Llama"](size).eval()
    app = FastAPI()

    @app.post("/v1/completions")
    def complete(ask: Ask) -> StreamingResponse:
        ids = torch.tensor([list(ask.prompt.encode())])
        tokens = Tokens()
        number = ask.max_tokens
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, "pad_token_id": 0}
        call = {"min_new_tokens": number, "max_new_tokens": number, "streamer": tokens, **options}

        def run() -> None:
            with torch.inference_mode():
                model.generate(ids, **call)

        threading.Thread(target=run).start()

        def events() -> Iterator[str]:
            while (new := tokens.queue.get()) is not None:
                text = bytes(i % 128 for i in new).decode()
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': number}})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    name, T = sys.argv[1], int(sys.argv[2])
    size = models.SIZES[name]
    size = size if size.T == T else dataclasses.replace(size.scaled(True), T=T)
    listening = socket.create_server(("127.0.0.1", 0))
    app = create(size)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
