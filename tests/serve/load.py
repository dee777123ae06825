"""Mixed load on a server process: streams, disconnects, slow readers, bad requests. Memory must stay flat.

    python -m tests.serve.load --minutes 10 [--run RUN] [--clients 24] [--seed 0]

Without --run the server has a byte model of v0's shape with random weights. Exit code 1 if a request failed that should
not have, or if the resident memory of the server grew by more than 5 % after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MOST_GROWTH = 0.05
WARM_SHARE = 0.25
"""Share of the time after which the memory is measured for the first time: caches are full then."""


class Report(NamedTuple):
    """What the load has done, and the resident memory of the server in KB."""

    counts: collections.Counter[str]
    failures: list[str]
    warm: int
    last: int

    @property
    def growth(self) -> float:
        return self.last / self.warm - 1


class Load:
    """Clients that ask one after the other, each for something at random."""

    def __init__(self, port: int, model: str, seed: int) -> None:
        self._port = port
        self._model = model
        self._random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    async def client(self, end: float) -> None:
        kinds = [self.stream, self.whole, self.disconnect, self.slow, self.half_open, self.bad, self.conversation]
        while time.monotonic() < end or (len(self.counts) < len(kinds) and not self.failures):  # a slow machine
            kind = self._random.choice(kinds)
            try:
                await asyncio.wait_for(kind(), 120)
                self.counts[kind.__name__] += 1
            except Exception as err:
                self.failures.append(f"{kind.__name__}: {type(err).__name__}: {err}")

    def _body(self, tokens: int, **more: object) -> dict[str, object]:
        words = " ".join(self._random.choices(["the", "cat", "sat", "on", "a", "mat"], k=self._random.randint(1, 30)))
        return {"model": self._model, "prompt": words, "max_tokens": tokens, "temperature": 0.8, **more}

    async def _open(self, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        return reader, writer

    async def _ask(self, path: str, body: object, status: int = 200) -> bytes:
        reader, writer = await self._open(path, body)
        received = await reader.read(-1)
        writer.close()
        assert received.startswith(b"HTTP/1.1 %d" % status), received[:200]
        return received

    async def stream(self) -> None:
        received = await self._ask("/v1/completions", self._body(self._random.randint(1, 120), stream=True))
        assert b"data: [DONE]" in received and b'"error"' not in received

    async def whole(self) -> None:
        tokens = self._random.randint(1, 120)
        received = await self._ask("/v1/completions", self._body(tokens, logprobs=self._random.choice([None, 3])))
        assert b'"completion_tokens":%d' % tokens in received

    async def disconnect(self) -> None:
        _, writer = await self._open("/v1/completions", self._body(4000, stream=self._random.random() < 0.7))
        await asyncio.sleep(self._random.random())
        writer.transport.abort()

    async def slow(self) -> None:
        reader, writer = await self._open("/v1/completions", self._body(150, stream=True, logprobs=5))
        received = b""
        while chunk := await reader.read(2048):
            received = received[-100:] + chunk
            await asyncio.sleep(0.02)
        writer.close()
        assert b"data: [DONE]" in received, received

    async def half_open(self) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        await asyncio.sleep(self._random.random())
        writer.transport.abort()

    async def bad(self) -> None:
        await self._ask("/v1/completions", self._random.choice([b"{", b"[]", b'{"model": 3}', b"\xff"]), 400)

    async def conversation(self) -> None:
        messages: list[dict[str, str]] = []
        for number in range(4):
            messages.append({"role": "user", "content": f"question {number} of {self._random.randint(0, 99)}"})
            body = {"model": self._model, "messages": messages, "max_tokens": 20}
            received = await self._ask("/v1/chat/completions", body)
            reply = json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})


def resident(pid: int) -> int:
    """The resident memory of a process in KB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


async def run(port: int, model: str, pid: int, *, seconds: float, clients: int, seed: int) -> Report:
    """Load a server for some time and return what happened."""
    load = Load(port, model, seed)
    end = time.monotonic() + seconds
    tasks = [asyncio.create_task(load.client(end)) for _ in range(clients)]
    await asyncio.sleep(WARM_SHARE * seconds)
    samples = [resident(pid)]
    while time.monotonic() < end:
        await asyncio.sleep(seconds / 40)
        samples.append(resident(pid))
    await asyncio.gather(*tasks)
    return Report(load.counts, load.failures, max(samples[:4]), max(samples[-4:]))


def start_server(run_path: Path | None, *options: str) -> tuple[subprocess.Popen[str], int, str]:
    """Start `niels-gpt serve`; return the process, its port and the name of its model."""
    if run_path is None:
        import torch

        from niels_gpt import GPT, ModelConfig, save_checkpoint

        torch.manual_seed(0)
        model = GPT(ModelConfig())
        run_path = Path(tempfile.mkdtemp()) / "random.pt"
        save_checkpoint(run_path, model, None, 0, model.config)
    command = [sys.executable, "-m", "niels_gpt", "serve", str(run_path), "--port", "0", "--quiet", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"serving (\S+) on http://[\d.]+:(\d+)", line)
    assert found is not None, line
    return process, int(found[2]), found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed load on niels-gpt serve; memory must stay flat.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    process, port, model = start_server(options.run)
    try:
        report = asyncio.run(
            run(port, model, process.pid, seconds=60 * options.minutes, clients=options.clients, seed=options.seed)
        )
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    print(f"{sum(report.counts.values())} requests: {dict(report.counts)}")
    print(f"memory {report.warm / 1024:.1f} MiB after the warm-up, {report.last / 1024:.1f} MiB at the end", end=" ")
    print(f"({100 * report.growth:+.1f} %), exit code {code}, {len(report.failures)} failures")
    for failure in report.failures[:20]:
        print(f"  {failure}")
    sys.exit(1 if report.failures or report.growth > MOST_GROWTH or code else 0)


if __name__ == "__main__":
    main()
