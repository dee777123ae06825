"""The application: OpenAI's API, health and metrics, behind the middleware."""

from __future__ import annotations

import contextlib
import mimetypes
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt import __version__
from niels_gpt.serve import openai_routes
from niels_gpt.serve.access_log import AccessLog, LineWriter
from niels_gpt.serve.errors import APIError, add_handlers
from niels_gpt.serve.limits import BodyLimit, Limits
from niels_gpt.serve.metrics import Metrics
from niels_gpt.serve.security import Guard
from niels_gpt.serve.served_model import ServedModel
from niels_gpt.system.files import sha256_bytes

STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""Not those of the machine: some systems have another type for .js, which a browser does not run."""


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorBody


class Draining:
    """ASGI middleware that answers new requests with 503 while the server shuts down."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._state.draining and scope["path"] != "/metrics":
            err = APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
            await err.send(send)
        else:
            await self._app(scope, receive, send)


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET, with the same headers and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message if message["type"] == "http.response.start" else {**message, "body": b""})

        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send_head)
        finally:
            scope["route"] = as_get.get("route")  # for the metrics


class PageFiles:
    """ASGI app for GET of the files of a folder (and HEAD, see `HeadAsGet`).

    They are read once: a request only chooses one of their names, and never reaches the file system.

    Browsers ask again before they use a file (`no-cache`), so that those of two versions are never mixed; an ETag makes
    the answer short. starlette's StaticFiles takes twice as long, since it reads the file system in threads.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                kind = STATIC_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                headers = {"etag": f'"{sha256_bytes(data)[:32]}"', "cache-control": "no-cache", "content-type": kind}
                self._files[path.relative_to(folder).as_posix()] = data, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        name = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        data, headers = found
        if Headers(scope=scope).get("if-none-match") == headers["etag"]:
            response = Response(status_code=304, headers={k: v for k, v in headers.items() if k != "content-type"})
        else:
            response = Response(data, headers=headers)
        await response(scope, receive, send)


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
    routers: further routes; `app.state` has `models` (by id), `limits`, `metrics` and `generations`,
        and `closing`, which is set when the server ends: long work in threads looks at it.
    static: a folder of files for /static, which need no API key. They are read now: a request names no path.
    """
    limits = limits or Limits()
    metrics = Metrics()
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
    app.state.metrics = metrics
    app.state.generations = set()
    app.state.draining = False
    app.state.closing = threading.Event()
    for model in models:
        admission = model.admission
        metrics.watch(model.id, lambda a=admission: a.active, lambda a=admission: a.waiting)  # type: ignore[misc]
    metrics.models(app.state.models)
    add_handlers(app)
    app.include_router(openai_routes.router)
    _add_schema_of_errors(app)

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


def _add_schema_of_errors(app: FastAPI) -> None:
    """Add the component that the routes refer to; FastAPI has only those of the models in its routes."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        found = Error.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(found.pop("$defs", {}))
        components["Error"] = found
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # what is invalid is 400 here
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
