"""Run the application with uvicorn: bind a socket, and shut down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from niels_gpt.serve.errors import APIError
from niels_gpt.serve.http_protocol import protocol
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.security import HEAD_BYTES

KEEP_ALIVE_SECONDS = 60


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with exit code 0 while it loads models; `run` then replaces the handler."""
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any free one. Raises ValueError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # Accepted sockets inherit it. asyncio sets it only for sockets with an explicit protocol; without it the body
        # of a response waits 40 ms for the client to acknowledge the headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use: choose another with --port, or any with --port 0"
            ) from None
        raise ValueError(f"cannot listen on {host}, port {port}: {err.strerror or err}") from None


def address(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, but after SIGINT or SIGTERM it still listens until the running requests have ended.

    New requests get 503 meanwhile. After `shutdown_seconds`, or a second signal, what still runs is ended: the last
    event of a stream is an error.
    """

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(limits),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=3,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        super().__init__(config)
        self._app = app
        self._limits = limits
        self._signals = 0
        self._drained: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self.should_exit = True
            self.force_exit = self._signals > 2 and sig == signal.SIGINT

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._drained is None:
            self._app.state.draining = True
            self._drained = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        generations = self._app.state.generations
        end = self._limits.shutdown_seconds
        while generations and end > 0 and self._signals < 2:
            await asyncio.sleep(0.05)
            end -= 0.05
        for generation in list(generations):
            generation.stop(APIError(503, "the server has shut down", code="shutting_down"), "shutdown")
        self.should_exit = True


def run(app: FastAPI, listening: socket.socket, limits: Limits) -> None:
    """Serve until a signal ends the server."""
    Server(app, limits).run(sockets=[listening])
