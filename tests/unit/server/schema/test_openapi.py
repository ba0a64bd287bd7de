"""The OpenAPI document tells of every route and field, and its page of all the document does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import APIRouter
from msgspec import Meta
from starlette.responses import Response
from starlette.routing import BaseRoute

from srm.engine.client.client import EngineClient
from srm.server.routes.app import OPERATIONS, create_app
from srm.server.routes.pages import page, spelled
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.openapi import BodySchema, Operation, document
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring
from tests.unit.server.conftest import Served

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def document_schema() -> Schema:
    return document(OPERATIONS, "srm", "1")


def paths_of(routes: Iterable[BaseRoute]) -> set[tuple[str, str]]:
    """Method and path of every route, those of included routers among them."""
    paths = set()
    for route in routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            paths |= paths_of(inner.routes)
        else:
            path = getattr(route, "path_format", None) or route.path  # type: ignore[attr-defined]
            methods = getattr(route, "methods", None) or {"GET"}
            paths |= {(method, path) for method in methods - {"HEAD", "OPTIONS"}}
    return paths


def list_routes(document_schema: Schema) -> set[tuple[str, str]]:
    return {
        (m.upper(), path) for path, methods in document_schema["paths"].items() for m in methods
    }


def test_every_route_is_told_and_nothing_else(text: Text, document_schema: Schema) -> None:
    app, router = create_app(ServerWiring(), EngineClient("tcp://127.0.0.1:1"), text), APIRouter()
    assert list_routes(document_schema) == paths_of(app.routes)

    @router.put("/secret")
    async def secret() -> Response:
        return Response()

    app.include_router(router)
    assert paths_of(app.routes) - list_routes(document_schema) == {("PUT", "/secret")}


def test_every_reference_leads_somewhere_and_ids_are_unique(document_schema: Schema) -> None:
    for target in re.findall(r'"#/([^"]+)"', json.dumps(document_schema)):
        result: Any = document_schema
        for step in target.split("/"):
            result = result[step]
        assert result
    ids = [
        method["operationId"]
        for methods in document_schema["paths"].values()
        for method in methods.values()
    ]
    assert len(set(ids)) == len(ids)


def test_a_request_has_every_field_with_the_ranges_that_are_checked(
    document_schema: Schema,
) -> None:
    schema = document_schema["components"]["schemas"]["CompletionRequest"]
    (body,) = (
        operation.body
        for operation in OPERATIONS
        if operation.path == "/v1/completions" and operation.body
    )
    fields = schema["properties"]
    assert set(fields) == {*CompletionRequest.__struct_encode_fields__, *body.neutral}
    assert set(NEUTRAL) <= set(fields)
    assert (schema["required"], schema["additionalProperties"]) == (["prompt"], {"type": "null"})
    assert all(field["description"] for field in fields.values())
    number = {"type": "number", "minimum": 0, "maximum": 1}
    assert (fields["top_p"]["anyOf"], fields["top_p"]["default"]) == ([number, {"type": "null"}], 1)
    assert fields["seed"]["anyOf"][0]["maximum"] == 2**64 - 1
    kinds = [
        (field["type"], field.get("items", {}).get("type")) for field in fields["prompt"]["anyOf"]
    ]
    assert kinds == [
        ("string", None),
        *(("array", name) for name in ("string", "integer", "array")),
    ]


def test_what_every_reply_has_is_required(document_schema: Schema) -> None:
    usage = document_schema["components"]["schemas"]["Usage"]
    assert usage["required"] == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert {"prompt_tokens_details", "discarded_tokens"} < set(usage["properties"])


class Thing(msgspec.Struct):
    """A thing.

    And more of it.
    """

    size: Annotated[int, Meta(ge=1, description="at least 1")]
    """How large."""
    name: str = "x"


def test_a_new_operation_takes_no_more_than_its_entry() -> None:
    operation = Operation(
        method="PUT",
        path="/things/{name}",
        summary="Put it.",
        reply=Thing,
        parameters={"name": "Its name."},
        body=BodySchema(kind=Thing, neutral={"colour": ("",)}),
        errors=(404,),
    )
    document_schema = document([operation], "t", "1")
    one = document_schema["paths"]["/things/{name}"]["put"]
    assert " ".join(one["responses"]) == "200 400 401 404 408 413 415 429 500 503"
    assert one["parameters"][0]["name"] == "name"
    fields = document_schema["components"]["schemas"]["Thing"]
    assert fields["description"] == "A thing."
    size = {"type": "integer", "minimum": 1, "description": "How large. Allowed: at least 1."}
    assert fields["properties"]["size"] == size
    assert fields["properties"]["colour"]["enum"] == ["", None]


class Undescribed(msgspec.Struct):
    names: list[str] = []


def test_a_field_without_words_for_what_is_allowed_is_named() -> None:
    body = BodySchema(kind=Undescribed)
    operation = Operation(method="PUT", path="/", summary="Put it.", reply=Thing, body=body)
    with pytest.raises(TypeError, match=r"Undescribed\.names = ListType: .*Meta\(description"):
        document([operation], "t", "1")


def test_the_page_tells_all_and_loads_nothing(document_schema: Schema) -> None:
    html = page(document_schema)
    assert not {*re.findall(r"<(\w+)", html)} & {"link", "img", "iframe", "object", "embed", "base"}
    markup = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    targets = {*re.findall(r'\b(?:src|href|srcset|action|data|poster)="([^"]*)"', markup)}
    ids = {*re.findall(r'\bid="([^"]*)"', html)}
    assert "openapi.json" in targets <= {"openapi.json", *(f"#{name}" for name in ids)}
    assert not re.search(r"https?:|src=|@import|url\(", html)
    for method, path in list_routes(document_schema):
        assert f"<code>{method} {path}</code>" in html
    for name, schema in document_schema["components"]["schemas"].items():
        assert name in ids
        assert all(f"<code>{field}</code>" in html for field in schema["properties"])


SPELLED: dict[str, Schema] = {
    "integer (≥ 0, ≤ 20)": {"type": "integer", "minimum": 0, "maximum": 20},
    "array of string (≥ 1 characters) (≤ 9 entries)": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "maxItems": 9,
    },
    "B or null": {"anyOf": [{"$ref": "#/a/B"}, {"type": "null"}]},
    "B": {"type": "string", "contentSchema": {"$ref": "#/a/B"}},
    "[DONE]": {"const": "[DONE]"},
    '"" or null': {"enum": ["", None]},
    "object of number": {"type": "object", "additionalProperties": {"type": "number"}},
    "anything": {},
}


def test_schemas_are_spelled() -> None:
    assert [spelled(schema) for schema in SPELLED.values()] == list(SPELLED)


async def test_both_are_served(served: Served, document_schema: Schema) -> None:
    async with served() as http:
        value, shown = await http.get("/openapi.json"), await http.get("/docs")
    assert value.json() == msgspec.json.decode(msgspec.json.encode(document_schema))
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    (script,) = re.findall(r"<script>(.*?)</script>", shown.text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
