"""GET /: a page to watch the server and to try it, out of the files in `dashboard/`.

The files are fixed when the process starts, and only they are served: no path of a request ever
reaches the file system. The page reads `/metrics` and the public API of its own origin; the browser
holds it to that by the policy sent along.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from engine.errors import NotFound
from server.schema.openapi import Operation

OPERATIONS = (
    Operation(
        method="GET",
        path="/",
        summary="A page to watch the server and to try it.",
        reply=("text/html",),
    ),
    Operation(
        method="GET",
        path="/dashboard/{name}",
        summary="The files of that page.",
        parameters={"name": "The name of a file."},
        reply=("text/html", "text/css", "text/javascript", "image/svg+xml"),
        errors=(404,),
    ),
)

FOLDER = Path(__file__).with_name("dashboard")
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> APIRouter:
    """The routes of this module."""
    router = APIRouter()
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}

    def send(name: str) -> Response:
        if name not in files:
            raise NotFound(f"the page has no file {name!r}; it has {', '.join(sorted(files))}")
        return Response(files[name], headers=HEADERS, media_type=_MEDIA_TYPES[Path(name).suffix])

    @router.get("/")
    async def page() -> Response:
        return send("index.html")

    @router.get("/dashboard/{name}")
    async def file(name: str) -> Response:
        return send(name)

    return router
