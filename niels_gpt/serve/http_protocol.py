"""uvicorn's HTTP protocol with limits for clients that are slow, silent, or send what is not HTTP."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from niels_gpt.serve.errors import APIError
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.security import headers_too_large

SLICE = 4096
"""Bytes that are parsed at a time. They can hold 700 chunks of a body, each of which takes h11 40 microseconds; the
other connections have their turn in between."""


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return the protocol class with these limits."""

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._head_timer: asyncio.TimerHandle | None = None
            self._stall_timer: asyncio.TimerHandle | None = None
            self._unparsed = b""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head_timer, self._stall_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            waiting = bool(self._unparsed)
            self._unparsed += data
            if not waiting:
                self._parse_slice()

        def _parse_slice(self) -> None:
            if self.transport.is_closing():
                self._unparsed = b""
                return
            data, self._unparsed = self._unparsed[:SLICE], self._unparsed[SLICE:]
            if self._unparsed:
                self.transport.pause_reading()
                self.loop.call_soon(self._parse_slice)
            elif not self.flow.read_paused:
                self.transport.resume_reading()
            self._parse(data)

        def _parse(self, data: bytes) -> None:
            try:
                super().data_received(data)
            except UnicodeDecodeError:  # a path that is not ASCII
                self.send_400_response("Invalid HTTP request received.")
                return
            if self.cycle is None or self.cycle.response_complete:
                self._expect_head()
            elif self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _expect_head(self) -> None:
            """Close the connection if no complete headers arrive in time."""
            if self._head_timer is None and not self.transport.is_closing():
                self._head_timer = self.loop.call_later(limits.head_seconds, self._head_is_late)

        def _head_is_late(self) -> None:
            self._head_timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()
                return
            err = sys.exc_info()[1]  # uvicorn calls this where it handles the error, but does not pass it
            if isinstance(err, h11.RemoteProtocolError) and err.error_status_hint == 431:
                error = headers_too_large()
            else:
                error = APIError(400, msg, code="invalid_http")
            response, reason = error.last_response(), HTTPStatus(error.status).phrase.encode("ascii")
            start = h11.Response(status_code=error.status, headers=response.raw_headers, reason=reason)
            for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall_timer = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # close() waits until the rest of the response has been read.
            self._stall_timer = self.loop.call_later(limits.stall_seconds, self.transport.abort)

    return LimitedProtocol
