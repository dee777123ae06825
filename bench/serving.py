"""Servers in child processes, ours and a plain one with transformers, and a client that reads their streams.

The client shares the cores with the server, so it parses nothing: it counts events until the last one.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.case import temporary_folder
from bench.models import Size

PROMPT = "hello world"


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the name of its model."""

    port: int
    model: str


@dataclass(frozen=True)
class Stream:
    """One response: when its first event and its last byte arrived, in seconds, and its number of tokens."""

    first: float
    last: float
    tokens: int


def start_ours(size: Size, device: str, slots: int) -> Address:
    """Save a checkpoint with random weights and start `niels-gpt serve` with it."""
    import torch

    from bench.models import niels_gpt
    from niels_gpt.runs.checkpoint import save_checkpoint

    torch.manual_seed(0)
    path = temporary_folder() / "bench.pt"
    if size.V > 256:
        size = dataclasses.replace(size, V=_train_tokenizer(path.with_name("tokenizer.model"), size.V))
    model = niels_gpt(size)
    save_checkpoint(path, model, None, 0, model.config)
    command = [
        "-m",
        "niels_gpt",
        "serve",
        str(path),
        "--port",
        "0",
        "--quiet",
        "--device",
        device,
        "--slots",
        str(slots),
    ]
    return Address(_start(command), "bench")


def _train_tokenizer(path: Path, V: int) -> int:
    """Write a tokenizer of V ids, trained on random words, and return V."""
    import random

    from niels_gpt.tokenizer import load_tokenizer, train_tokenizer

    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(4, 9))) for _ in range(2 * V)]
    texts = (" ".join(draw.choices(words, k=1000)) for _ in range(400))
    trained = train_tokenizer(texts, path.parent / "tokenizer", vocab_size=V - 4)
    shutil.copyfile(trained, path)
    return load_tokenizer(path).vocab_size


def start_transformers(size: Size) -> Address:
    """Start the plain server: FastAPI, one `generate` in a thread per request."""
    return Address(_start(["-m", "bench.transformers_server", size.name, str(size.T)]), "bench")


def _start(arguments: list[str]) -> int:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://[\d.]+:(\d+)", line)
        if found:
            return int(found[1])
    raise RuntimeError(f"the server did not start: {' '.join(arguments)}")


async def read_stream(address: Address, tokens: int, prompt: str = PROMPT) -> Stream:
    """Ask for a stream of `tokens` greedy tokens and read it to its end. Raises RuntimeError for anything else."""
    body = json.dumps(
        {"model": address.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        | {"stream_options": {"include_usage": True}}
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    received, first = b"", 0.0
    while chunk := await reader.read(65536):
        received = received[-400:] + chunk
        if not first and b"data: " in received:
            first = time.perf_counter() - began
    last = time.perf_counter() - began
    writer.close()
    found = re.search(rb'"completion_tokens": ?(\d+)', received)
    if found is None or int(found[1]) != tokens or b"[DONE]" not in received:
        raise RuntimeError(f"the stream did not end with {tokens} tokens: {received[-300:]!r}")
    return Stream(first, last, tokens)


def read_streams(address: Address, number: int, tokens: int) -> list[Stream]:
    """Read several streams at a time."""

    async def read() -> list[Stream]:
        return await asyncio.gather(*(read_stream(address, tokens) for _ in range(number)))

    return asyncio.run(read())
