"""The application: OpenAI's API, health and metrics, behind the middleware."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt import __version__
from niels_gpt.serve import openai_routes
from niels_gpt.serve.errors import APIError, HTTPMiddleware, add_handlers
from niels_gpt.serve.limits import BodyLimit, Limits
from niels_gpt.serve.page_routes import PageFiles
from niels_gpt.serve.records import AccessLog, LineWriter, Metrics
from niels_gpt.serve.security import Guard
from niels_gpt.serve.served_model import ServedModel


class Draining(HTTPMiddleware):
    """ASGI middleware that answers new requests with 503 while the server shuts down."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        super().__init__(app)
        self._state = state

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state.draining and scope["path"] != "/metrics":
            await APIError(503, "the server is shutting down", code="shutting_down", retry_after=10).send(send)
        else:
            await self.app(scope, receive, send)


class HeadAsGet(HTTPMiddleware):
    """ASGI middleware that answers HEAD as GET, with the same headers and no body."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message if message["type"] == "http.response.start" else {**message, "body": b""})

        as_get = {**scope, "method": "GET"}
        try:
            await self.app(as_get, receive, send_head)
        finally:
            scope["route"] = as_get.get("route")  # for the metrics


def create_app(
    models: Sequence[ServedModel],
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    local: bool = True,
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    access_log: IO[str] | None = None,
    routers: Sequence[APIRouter] = (),
    static: Path | None = None,
) -> FastAPI:
    """Return the application of these models, whose threads it starts and stops.

    local: the server is bound to a loopback address, so that only local names are allowed in the Host header.
    origins, hosts: other sites whose pages may use the server, and other names for the Host header; see `Guard`.
    routers: further routes; `app.state` has `models` (by id), `limits` and `generations`, and
        `closing`, which is set when the server ends: long work in threads looks at it.
    static: a folder of files for /static, which need no API key. They are read now: a request names no path.
    """
    limits = limits or Limits()
    metrics = Metrics({model.id: model.admission for model in models})
    writer = None if access_log is None else LineWriter(access_log)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in models:
            model.worker.start()
        try:
            yield
        finally:
            app.state.closing.set()
            for model in models:
                model.worker.stop()
            if writer is not None:
                writer.close()

    app = FastAPI(
        title="niels-gpt",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.models = {model.id: model for model in models}
    app.state.limits = limits
    app.state.generations = set()
    app.state.draining = False
    app.state.closing = threading.Event()
    add_handlers(app)
    app.include_router(openai_routes.router)
    _drop_422(app)

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Whether the threads of all models run."""
        alive = all(model.worker.alive for model in request.app.state.models.values())
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for router in routers:
        app.include_router(router)
    if static is not None:
        app.mount("/static", PageFiles(static))
    # The last one added is the first to see a request.
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(Draining, state=app.state)
    app.add_middleware(Guard, key=api_key, local=local, origins=origins, hosts=hosts)
    app.add_middleware(AccessLog, metrics=metrics, writer=writer)
    return app


def _drop_422(app: FastAPI) -> None:
    """Drop FastAPI's response 422 from the schema: what is invalid is 400 here."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
