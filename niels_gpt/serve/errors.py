"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}` and a status code."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT_CLOSED = 499
"""The client went away before its response was complete: only the access log shows it."""
_TYPES = {
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    408: "timeout_error",
}


@dataclass(eq=False)
class APIError(Exception):
    """What a client did wrong, or what the server cannot do now, with its status code."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    retry_after: int | None = None
    """Seconds after which the same request may succeed, for a header."""

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as a response."""
        # ASCII only: a message may quote a lone surrogate.
        response = Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")
        if self.retry_after is not None:
            response.headers["retry-after"] = str(self.retry_after)
        return response

    def last_response(self) -> Response:
        """The error as the last response of a connection: the body of the request may be unread."""
        response = self.response()
        response.headers["connection"] = "close"
        return response

    async def send(self, send: Send) -> None:
        """Send the error from a middleware."""
        response = self.last_response()
        await send({"type": "http.response.start", "status": self.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": Error}
    for status, text in {
        400: "A parameter is wrong or not supported.",
        401: "The API key is missing or wrong.",
        403: "The Host or Origin header is of another site.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full; the header Retry-After says when to try again.",
        500: "The model failed.",
        503: "The server is shutting down.",
        504: "The request took too long.",
    }.items()
}


class HTTPMiddleware(ABC):
    """ASGI middleware for HTTP requests: `serve` answers one, or passes it on to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.serve if scope["type"] == "http" else self.app)(scope, receive, send)

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""


def above_limit(what: str, limit: int, *, param: str, code: str | None = None) -> APIError:
    """Return the 400 of a request for more than the server allows."""
    return APIError(400, f"{what}, more than {limit}, the limit of this server", param=param, code=code)


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the 400 of the most specific error that pydantic found in a request: of a union, it reports all types."""
    if not errors:
        return APIError(400, "the request is invalid")
    # A list with too many items says more than "not a string", which is what the other type of the union reports.
    first = max(errors, key=lambda error: (len(error.get("loc", ())), not str(error.get("type")).endswith("_type")))
    location = [part for part in first.get("loc", ()) if part != "body"]
    names = [str(part) for part in location if not _names_a_type(part)]
    param = ".".join(names)[:200] or None
    if first.get("type") == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "")).lower()
        return APIError(400, f"the body is not valid JSON: {reason} at character {param}", code="invalid_json")
    if not location and first.get("type") == "missing":
        return APIError(400, "the body is empty: send a JSON object", code="empty_body")
    if not location and str(first.get("type")).endswith("attributes_type"):
        return APIError(400, "the body must be a JSON object with Content-Type: application/json", code="invalid_json")
    if first.get("type") == "extra_forbidden":
        return APIError(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    message = str(first.get("msg", "invalid value")).removeprefix("Value error, ")
    return APIError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _names_a_type(part: object) -> bool:
    """Whether a part of pydantic's location is the tag of a union (`list[str]`, `constrained-str`), not a parameter."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or any(c in part for c in "[-("))


_JSON_PART = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]|[0-9]++', re.DOTALL)
"""A string, a bracket or the digits of a number; none of them is part of another."""
DEPTH = 64
"""Where the error about nesting points to; no request needs half of it. Python's parser fails at about 1000."""


def describe_body(err: BaseException | None, body: bytes) -> APIError:
    """Return the 400 of a body at which Python's JSON parser failed without naming a position."""
    if isinstance(err, UnicodeDecodeError):
        reason = f"the body is not valid {err.encoding.upper()}: {err.reason} at byte {err.start}"
    elif isinstance(err, RecursionError):
        reason = f"the body is nested too deeply: more than {DEPTH} arrays and objects within each other"
        reason += _at_byte(_deep_part(body))
    elif isinstance(err, ValueError):
        most = sys.get_int_max_str_digits()
        long = (part for part in _JSON_PART.finditer(body) if part[0][:1].isdigit() and len(part[0]) > most)
        reason = f"the body has an integer of more than {most} digits" + _at_byte(next(long, None))
    else:
        reason = "the body cannot be parsed as JSON"
    return APIError(400, reason, code="invalid_json")


def _deep_part(body: bytes) -> re.Match[bytes] | None:
    """The bracket that opens the first array or object above DEPTH."""
    depth = 0
    for part in _JSON_PART.finditer(body):
        depth += (part[0] in b"[{") - (part[0] in b"]}")
        if depth > DEPTH:
            return part
    return None


def _at_byte(part: re.Match[bytes] | None) -> str:
    return "" if part is None else f", at byte {part.start()}"


def add_handlers(app: FastAPI) -> None:
    """Let every error of the app have this shape."""

    @app.exception_handler(APIError)
    async def on_api_error(_: Request, err: APIError) -> Response:
        return err.response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, err: RequestValidationError) -> Response:
        return describe_validation(err.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, err: HTTPException) -> Response:
        if err.status_code == 400 and err.__cause__ is not None:  # FastAPI's for every failure to parse the body
            return (await asyncio.to_thread(describe_body, err.__cause__, await request.body())).response()
        messages = {
            404: f"there is no {request.method} {request.url.path[:200]}",
            405: f"{request.method} is not allowed for {request.url.path[:200]}",
        }
        message = messages.get(err.status_code, str(err.detail) or HTTPStatus(err.status_code).phrase)
        return APIError(err.status_code, message, headers=err.headers).response()

    @app.exception_handler(Exception)
    async def on_bug(_: Request, __: Exception) -> Response:  # the server also prints its traceback
        return APIError(500, "the server failed; its log has the reason").last_response()
