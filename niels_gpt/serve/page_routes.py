"""The page: its HTML at /, the files that it loads under /static, and the routers of its views under /api."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from niels_gpt.serve import inspect_routes
from niels_gpt.system.files import sha256_bytes

FOLDER = Path(__file__).parent / "page"
STATIC = FOLDER / "static"
STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""Not those of the machine: some systems have another type for .js, which a browser does not run."""

router = APIRouter()


@router.get("/", include_in_schema=False)
async def show_page() -> HTMLResponse:
    """The page."""
    return HTMLResponse(INDEX, headers={"cache-control": "no-cache"})


INDEX = (FOLDER / "index.html").read_text(encoding="utf-8")
PAGE_ROUTERS = [router, inspect_routes.router]
"""What `create_app` needs for the page, together with STATIC."""


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
