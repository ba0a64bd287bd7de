"""The OpenAPI document tells of every route and field; its page loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import APIRouter
from msgspec import Meta
from starlette.responses import Response
from starlette.routing import BaseRoute

from srm.engine.client.client import EngineClient
from srm.server.dialects.chat.request import parse_chat
from srm.server.routes.app import OPERATIONS, create_app
from srm.server.routes.batches import parse_batch
from srm.server.schema.completion_request import CompletionRequest, parse_completion
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


def test_documents_every_field_of_a_request(document_schema: Schema) -> None:
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
    assert next(iter(fields)) == "prompt"
    number = {"type": ["number", "null"], "minimum": 0, "maximum": 1, "default": 1}
    assert fields["top_p"].items() >= number.items()
    assert fields["seed"]["maximum"] == 2**64 - 1
    assert fields["return"]["enum"] == ["choices", "counts", "unique", None]
    kinds = [
        (field["type"], field.get("items", {}).get("type")) for field in fields["prompt"]["anyOf"]
    ]
    assert kinds == [
        ("string", None),
        *(("array", name) for name in ("string", "integer", "array")),
    ]


def test_required_fields_come_first_and_all_are_described(document_schema: Schema) -> None:
    for operation in OPERATIONS:
        method = document_schema["paths"][operation.path][operation.method.lower()]
        described = method.get("parameters", [])
        if operation.body is not None:
            schema = document_schema["components"]["schemas"][operation.body.kind.__name__]
            required, fields = schema["required"], schema["properties"]
            assert list(fields)[: len(required)] == required
            described = [*described, *fields.values()]
        assert not [field for field in described if field["description"].startswith("Allowed:")]


READERS: dict[str, Callable[[bytes], object]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
    "/v1/batches": parse_batch,
}


@pytest.mark.parametrize("path", READERS)
def test_every_example_is_accepted(path: str, document_schema: Schema) -> None:
    content = document_schema["paths"][path]["post"]["requestBody"]["content"]
    for example in content["application/json"]["examples"].values():
        READERS[path](msgspec.json.encode(example["value"]))


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


async def test_both_are_served(served: Served, document_schema: Schema) -> None:
    async with served() as http:
        value, shown = await http.get("/openapi.json"), await http.get("/docs")
        loaded = re.findall(r'(?:src|href)="([^"]+)"', shown.text)
        files = [await http.get(f"/{name}") for name in loaded if not name.startswith("data:")]
        missing = await http.get("/docs/no-such-file")
    assert value.json() == msgspec.json.decode(msgspec.json.encode(document_schema))
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert len(files) == 4
    assert [file.status_code for file in files] == [200] * len(files)
    assert missing.status_code == 404
