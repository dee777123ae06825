"""Servers in child processes (ours, a plain one with transformers, llama-cpp-python's) and a client of their streams.

The client shares the cores with the server, so it parses nothing: it counts events until the last one.

Tokens are counted by the `usage` of the last event. llama-cpp-python's streams have none, but one event per character,
so events with text are counted there. For this, every token must be a character: no byte above 127 may have the largest
logit, so their rows of the embedding, which is also the head, are zero. That changes no shape, and so no speed.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import http.client
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import commands
from bench.case import Unavailable, temporary_folder
from bench.models import Size

PROMPT = "hello world"
TEXT_EVENT = b'"finish_reason": null'
"""In every event of llama-cpp-python that has text; the last event has "length" and no text."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the name of its model."""

    port: int
    model: str
    options: Mapping[str, object] = field(default_factory=dict)
    """Added to every request."""
    usage: bool = True
    """Whether the last event has the number of tokens; else events with text are counted."""


@dataclass(frozen=True)
class Stream:
    """One response: when its first event and its last byte arrived, in seconds, and its number of tokens."""

    first: float
    last: float
    tokens: int


def start_ours(size: Size, device: str, slots: int) -> Address:
    """Save a checkpoint with random weights and start `niels-gpt serve` with it."""
    path = _save_checkpoint(size)
    options = ["--port", "0", "--quiet", "--device", device, "--slots", str(slots)]
    return Address(_start(["niels_gpt", "serve", str(path), *options]), "bench")


def _save_checkpoint(size: Size) -> Path:
    """Save a model with random weights, and its tokenizer if it is not one of bytes."""
    import torch

    from bench.models import niels_gpt
    from niels_gpt.runs.checkpoint import save_checkpoint

    torch.manual_seed(0)
    path = temporary_folder() / "bench.pt"
    if size.V > 256:
        size = dataclasses.replace(size, V=_train_tokenizer(path.with_name("tokenizer.model"), size.V))
    model = niels_gpt(size)
    if size.V == 256:
        with torch.no_grad():
            model.tok_emb.weight[128:] = 0.0
    save_checkpoint(path, model, None, 0, model.config)
    return path


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
    return Address(_start(["bench.transformers_server", size.name, str(size.T)]), "bench")


def start_llama_cpp(size: Size, *, all_cores: bool = False) -> Address:
    """Export the checkpoint of `start_ours` as GGUF in f32 and start llama-cpp-python's server with it.

    all_cores: instead of half of them, its default. By default a new request ends the stream of another one, which is
    switched off here, as is its penalty for repetitions: it decodes greedily, as the others do. Raises Unavailable if
    llama-cpp-python is installed without its server.
    """
    try:
        importlib.import_module("llama_cpp.server.app")
    except ModuleNotFoundError as err:
        if err.name == "llama_cpp":
            raise
        raise Unavailable(f"no {err.name}: pip install 'llama-cpp-python[server]'") from None

    path = _save_checkpoint(size)
    model = path.with_suffix(".gguf")
    commands.run(["export", "gguf", str(path), "--out", str(model)])
    options = ["--n_ctx", str(size.T), "--interrupt_requests", "False", "--verbose", "False"]
    options += ["--n_threads", str(os.cpu_count())] if all_cores else []
    port = _start(["llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", "0", *options])
    return Address(port, str(model), {"repeat_penalty": 1.0}, usage=False)


def _start(arguments: list[str]) -> int:
    """Start `python -m ARGUMENTS` and return its port, which it prints as part of a URL."""
    path = temporary_folder() / "log"
    with path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=log, stderr=subprocess.STDOUT)
    atexit.register(process.kill)
    while True:
        ended = process.poll() is not None
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"http://[\d.]+:(\d+)", text):
            return int(found[1])
        if ended:
            last = (text.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise RuntimeError(f"{arguments[0]} did not start: {last}")
        time.sleep(0.05)


async def read_stream(address: Address, tokens: int, prompt: str = PROMPT) -> Stream:
    """Ask for a stream of `tokens` greedy tokens and read it to its end. Raises RuntimeError for anything else."""
    body = json.dumps(
        {"model": address.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        | {"stream_options": {"include_usage": True}, **address.options}
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    received, first, texts = b"", 0.0, 0
    while chunk := await reader.read(65536):
        texts += (received[1 - len(TEXT_EVENT) :] + chunk).count(TEXT_EVENT)
        received = received[-400:] + chunk
        if not first and b"data: " in received:
            first = time.perf_counter() - began
    last = time.perf_counter() - began
    writer.close()
    if address.usage:
        found = re.search(rb'"completion_tokens": ?(\d+)', received)
        counted = int(found[1]) if found else 0
    else:
        counted = texts
    if counted != tokens or b"[DONE]" not in received:
        raise RuntimeError(f"the stream did not end with {tokens} tokens: {received[-300:]!r}")
    return Stream(first, last, tokens)


def read_streams(address: Address, number: int, tokens: int) -> list[Stream]:
    """Read several streams at a time."""

    async def read() -> list[Stream]:
        return await asyncio.gather(*(read_stream(address, tokens) for _ in range(number)))

    return asyncio.run(read())


def converse(address: Address, questions: Iterable[str], tokens: int) -> list[float]:
    """Ask the questions in a conversation; return the seconds to the first token of each reply.

    Every reply has `tokens` tokens and is sent back with the next question, as clients of chat do.
    """
    messages: list[dict[str, str]] = []
    seconds = []
    connection = http.client.HTTPConnection("127.0.0.1", address.port)
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = json.dumps(
            {"model": address.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        )
        began, first, reply = time.perf_counter(), 0.0, ""
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                text = json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content")
                if text and not first:
                    first = time.perf_counter() - began
                reply += text or ""
        if not first:
            raise RuntimeError(f"the reply of turn {len(seconds) + 1} has no text")
        messages.append({"role": "assistant", "content": reply})
        seconds.append(first)
    connection.close()
    return seconds
