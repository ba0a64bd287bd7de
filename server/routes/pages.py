"""The pages for people: GET / to watch and try the server, GET /docs for its interface.

Each is a folder whose files are fixed when the process starts, and only they are served: no path of
a request ever reaches the file system. A page reads its own origin and nothing else; the browser
holds it to that by the policy sent along. The second is Swagger UI, which shows GET /openapi.json:
`docs/decisions/0028-swagger-ui.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.responses import Response

from srm.errors import NotFound
from srm.files import read_file
from srm.server.schema.openapi import Operation, document

OPERATIONS = (
    Operation("GET", "/", "A page to watch the server and to try it.", ("text/html",)),
    Operation("GET", "/dashboard/{name}", "The files of that page.",
              ("text/html", "text/css", "text/javascript", "image/svg+xml", "application/json"),
              parameters={"name": "The name of a file."}, errors=(404,)),
    Operation("GET", "/openapi.json", "This interface, as an OpenAPI document.",
              ("application/json",)),
    Operation("GET", "/docs", "The same as a page.", ("text/html",)),
    Operation("GET", "/docs/{name}", "The files of that page.",
              ("text/html", "text/css", "text/javascript", "text/plain"),
              parameters={"name": "The name of a file."}, errors=(404,)),
)  # fmt: skip

FOLDER = Path(__file__).with_name("dashboard")
_REFERENCE = Path(__file__).with_name("reference")
_EXAMPLE = "example.json"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TITLE = "srm"
_VERSION = "1"
"""Version of the interface; the server's own is another."""


def add_routes(
    router: APIRouter, operations: Iterable[Operation], root_path: str = "", example: str = ""
) -> None:
    """Add the routes of both pages; the second documents all operations, below `root_path`. Both
    show `example`, the model's own completion request as JSON, if there is one."""
    _serve(router, "/", "/dashboard", FOLDER, {_EXAMPLE: (example or "{}").encode()})
    _serve(router, "/docs", "/docs", _REFERENCE)
    if example:
        operations = _with_example(operations, msgspec.json.decode(example))

    @cache
    def as_json() -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return msgspec.json.encode(document(operations, _TITLE, _VERSION) | servers)

    @router.get("/openapi.json")
    async def openapi() -> Response:
        # Made when it is first asked for: it takes a third of a process's start.
        return Response(await asyncio.to_thread(as_json), media_type="application/json")


def _with_example(operations: Iterable[Operation], example: dict[str, Any]) -> list[Operation]:
    """Return the operations with the model's example of a completion, in place of those that only
    the demo can answer."""
    asked = {name: example[name] for name in ("prompt", "max_tokens") if name in example}

    def changed(operation: Operation) -> Operation:
        if operation.path != "/v1/completions" or operation.body is None:
            return operation
        usual = operation.body.examples.items()
        others = {name: was | asked for name, was in usual if not {"until", "verify"} & was.keys()}
        body = replace(operation.body, examples={"The model's own": example} | others)
        return replace(operation, body=body)

    return [changed(operation) for operation in operations]


def _serve(
    router: APIRouter, path: str, below: str, folder: Path, more: Mapping[str, bytes] = {}
) -> None:
    """Add a page, the files of its folder that it loads, and `more`, by their names."""
    files = {file.name: read_file(file) for file in folder.iterdir()} | dict(more)

    def send(name: str) -> Response:
        if name not in files:
            raise NotFound(f"the page has no file {name!r}; it has {', '.join(sorted(files))}")
        return Response(files[name], headers=HEADERS, media_type=_MEDIA_TYPES[Path(name).suffix])

    @router.get(path)
    async def page() -> Response:
        return send("index.html")

    @router.get(f"{below}/{{name}}")
    async def file(name: str) -> Response:
        return send(name)
