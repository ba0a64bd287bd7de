"""The pages for people: GET / to watch and try the server, GET /docs for its interface.

The files of the first, out of `dashboard/`, are fixed when the process starts, and only they are
served: no path of a request ever reaches the file system. It reads `/metrics` and the public API of
its own origin; the browser holds it to that by the policy sent along. The second, which is
GET /openapi.json in words, has its style and its script in itself and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from srm.engine.errors import NotFound
from srm.server.schema.openapi import Operation, document

OPERATIONS = (
    Operation("GET", "/", "A page to watch the server and to try it.", ("text/html",)),
    Operation("GET", "/dashboard/{name}", "The files of that page.",
              ("text/html", "text/css", "text/javascript", "image/svg+xml"),
              parameters={"name": "The name of a file."}, errors=(404,)),
    Operation("GET", "/openapi.json", "This interface, as an OpenAPI document.",
              ("application/json",)),
    Operation("GET", "/docs", "The same as a page.", ("text/html",)),
)  # fmt: skip

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
_TITLE = "srm"
_VERSION = "1"
"""Version of the interface; the server's own is another."""
_PAGE = Path(__file__).with_name("reference.html")
_SCRIPT = _PAGE.with_suffix(".js")
_RANGES = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} entries",
    "maxItems": "≤ {} entries",
}


def dashboard() -> APIRouter:
    """The routes of the page to watch and try the server."""
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


def reference(operations: Iterable[Operation]) -> APIRouter:
    """The routes that document all operations."""
    router = APIRouter()
    whole = document(operations, _TITLE, _VERSION)
    as_json = msgspec.json.encode(whole)
    as_page = page(whole).encode()
    script = base64.b64encode(hashlib.sha256(_SCRIPT.read_bytes()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'"

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(as_json, media_type="application/json")

    @router.get("/docs")
    async def docs() -> Response:
        headers = {"content-security-policy": policy}
        return Response(as_page, media_type="text/html", headers=headers)

    return router


def page(whole: dict[str, Any]) -> str:
    """The document as HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["spelled"] = spelled
    template = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    return template.render(whole, style=style, script=_SCRIPT.read_text(encoding="utf-8"))


def spelled(schema: dict[str, Any]) -> str:
    """A schema in words: `array of integer (≥ 0)`."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(spelled, schema["anyOf"])))
    if "contentSchema" in schema:
        return spelled(schema["contentSchema"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " or ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    words = str(schema.get("type", "anything"))
    if "items" in schema:
        words += f" of {spelled(schema['items'])}"
    elif isinstance(schema.get("additionalProperties"), dict):
        words += f" of {spelled(schema['additionalProperties'])}"
    ranges = [text.format(schema[name]) for name, text in _RANGES.items() if name in schema]
    return f"{words} ({', '.join(ranges)})" if ranges else words
