"""The page: its HTML at /, the files that it loads under /static, and the routers of its views under /api."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from niels_gpt.serve import inspect_routes

FOLDER = Path(__file__).parent / "page"
STATIC = FOLDER / "static"

router = APIRouter()


@router.get("/", include_in_schema=False)
async def show_page() -> HTMLResponse:
    """The page."""
    return HTMLResponse(INDEX, headers={"cache-control": "no-cache"})


INDEX = (FOLDER / "index.html").read_text(encoding="utf-8")
PAGE_ROUTERS = [router, inspect_routes.router]
"""What `create_app` needs for the page, together with STATIC."""
