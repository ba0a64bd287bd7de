"""The OpenAPI document: what each route takes and answers, generated from the wire structs.

Every module with routes lists them as `OPERATIONS`, and `app.py` hands all of them to `document`; a
test fails for a route that is in no list. Ranges come from `Meta`, meanings from the string under a
field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT, UnsetType

from srm.server.errors import ErrorBody
from srm.server.schema.validation import allowed
from srm.settings import field_docs

Schema = dict[str, Any]

VERSION = "3.2.0"
_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "There is no such thing.",
    403: "It would be more than the key may have; or only the operator may ask for this.",
    401: "The key is missing or not one of this server's.",
    408: "The body came too slowly.",
    409: "It would disturb what is going on, such as a change of the weights; or the `request_id` "
    "is that of a running request.",
    413: "The body is too large.",
    415: "The body has the type of a form; it must be application/json.",
    416: "The file has no such bytes.",
    429: "Too many requests with this key: try again after `retry-after` seconds.",
    500: "A bug of the server, or the engine failed.",
    503: "Overloaded, starting or stopping: try again after `retry-after` seconds.",
    504: "It took longer than it may.",
    507: "The disk is full.",
}
"""Meaning of each error status."""
_ABOUT = (
    "No field is ignored: one that is unknown, or asks for what the server does not do, is refused "
    "with a 400 whose `param` names it. Every error is an `ErrorBody`."
)
_EVERYWHERE = (401, 429, 500, 503)
"""Error statuses of every route."""
_HAVE_RETRY = (429, 503)


class Router(Protocol):
    """The methods of FastAPI's router that routes use. Batches need not import FastAPI."""

    def add_api_route(
        self, path: str, endpoint: Callable[..., Any], *, methods: list[str]
    ) -> None: ...


class BodySchema(msgspec.Struct, frozen=True):
    """A JSON request body, read as `server.schema.validation` does: null is the same as absent."""

    kind: type[msgspec.Struct]
    forms: Mapping[str, tuple[Any, ...]] = {}
    """Types of the fields that the wire spells in more ways than the struct."""
    neutral: Mapping[str, tuple[Any, ...]] = {}
    """Further fields that are accepted at these values only."""
    examples: Mapping[str, Schema] = {}
    """Whole bodies, by what they ask for."""


class Operation(msgspec.Struct, frozen=True):
    """One method of one path, as documented for clients."""

    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | tuple[str, ...]
    """Struct of the JSON of a 200, or its media types if it has no struct."""
    may_be_list: bool = False
    """Whether a 200 may also be a list of these structs."""
    events: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None = None
    """Struct of the events, if the same route answers with a stream when asked to; several if each
    event has a name and there is no `[DONE]`."""
    parts: tuple[type[msgspec.Struct], ...] = ()
    """Further structs that the reply refers to."""
    body: BodySchema | None = None
    parameters: Mapping[str, str] = {}
    """Meaning of each parameter in the path."""
    queries: Mapping[str, str] = {}
    """Meaning of each parameter in the query that may be given several times; beside a `query` they
    are not used."""
    query: type[msgspec.Struct] | None = None
    """Parameters in the query that may be given once."""
    form: type[msgspec.Struct] | None = None
    """The fields of a multipart form, which is the body; one of them is `bytes`, a file."""
    errors: tuple[int, ...] = ()
    """Statuses besides those of every route."""
    tag: str = ""
    """The group it is shown in."""


def reference(kind: type[msgspec.Struct]) -> Schema:
    """The schema of a struct by name; for the Meta of what is encoded before its reply."""
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def document(operations: Iterable[Operation], title: str, version: str) -> Schema:
    """The whole OpenAPI document."""
    paths: dict[str, dict[str, Schema]] = {}
    replies: list[type[msgspec.Struct]] = [ErrorBody]
    bodies: dict[type[msgspec.Struct], BodySchema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
        events = operation.events if isinstance(operation.events, tuple) else (operation.events,)
        named = (operation.reply, *events, *operation.parts)
        replies += [kind for kind in named if isinstance(kind, type)]
        if operation.body is not None:
            bodies[operation.body.kind] = operation.body
    schemas = _components(replies, is_reply=True)
    for body in bodies.values():
        schemas |= _request(body)
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version, "description": _ABOUT},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> Schema:
    has_input = operation.body is not None or operation.form is not None
    errors = {*operation.errors, *_EVERYWHERE, *((400, 408, 413) if has_input else ())}
    if operation.body is not None:
        errors.add(415)
    name = re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip("_")
    described: Schema = {
        "operationId": name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done.", "headers": _headers(), "content": _content(operation)},
            **{
                f"{status}": {"$ref": f"#/components/responses/{status}"}
                for status in sorted(errors)
            },
        },
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    content: dict[str, Schema] = {}
    if operation.body is not None:
        content[_JSON] = {"schema": reference(operation.body.kind)}
        if operation.body.examples:
            content[_JSON]["examples"] = {
                asked: {"value": value} for asked, value in operation.body.examples.items()
            }
    if operation.form is not None:
        fields = msgspec.structs.fields(operation.form)
        whole = {
            "type": "object",
            "properties": _fields(operation.form),
            "required": [field.encode_name for field in fields if field.required],
            "additionalProperties": False,
        }
        content["multipart/form-data"] = {"schema": whole}
    if content:
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(operation: Operation) -> list[Schema]:
    """Return what an operation takes in its path and query."""
    text = {"type": "string", "minLength": 1}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "description": meaning, "schema": text}
        for name, meaning in operation.parameters.items()
    ]
    several = {"type": "array", "items": text}
    parameters += [
        {"name": name, "in": "query", "description": meaning, "schema": several}
        for name, meaning in operation.queries.items()
    ]
    query = _fields(operation.query) if operation.query is not None else {}
    for field, schema in query.items():
        meaning = schema.pop("description")
        parameters.append({"name": field, "in": "query", "description": meaning, "schema": schema})
    return parameters


def _fields(kind: type[msgspec.Struct]) -> dict[str, Schema]:
    """The schema of each field that may be left out and is not null."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {}
    for field in msgspec.structs.fields(kind):
        schema = _any_of([hints[field.name]], has_null=False)
        if schema.get("contentEncoding"):
            schema = {"type": "string", "format": "binary"}
        schema["description"] = _meaning(kind, field.name, hints[field.name])
        fields[field.encode_name] = schema
    return fields


def _meaning(kind: type[msgspec.Struct], name: str, hint: Any) -> str:
    """What a field of a request means, and which values it may have."""
    meaning = field_docs(kind).get(name, "")
    return f"{meaning} Allowed: {_allowed(kind, name, hint)}.".lstrip()


def _allowed(kind: type[msgspec.Struct], name: str, hint: Any) -> str:
    try:
        return allowed(hint)
    except KeyError as error:
        raise TypeError(
            f"{kind.__name__}.{name} = {error.args[0].__name__}: its annotation must have a "
            "Meta(description=…) that says what is allowed"
        ) from None


def _content(operation: Operation) -> Schema:
    if isinstance(operation.reply, tuple):
        kinds = {name: "object" if name == _JSON else "string" for name in operation.reply}
        return {name: {"schema": {"type": kind}} for name, kind in kinds.items()}
    schema = reference(operation.reply)
    if operation.may_be_list:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content: Schema = {_JSON: {"schema": schema}}
    if operation.events is not None:
        content[_EVENTS] = {"itemSchema": _event(operation.events)}
    return content


def _event(kinds: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]) -> Schema:
    """An event of a stream: a line `data: …`, of JSON but for the last; or one of `event: …` and
    one of `data: …`."""
    is_named = isinstance(kinds, tuple)
    documents = kinds if isinstance(kinds, tuple) else (kinds, ErrorBody)
    json = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [reference(kind) for kind in documents]},
    }
    if is_named:
        named = {"event": {"type": "string"}, "data": json}
        return {"type": "object", "properties": named, "required": [*named]}
    data = {"anyOf": [json, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _error(status: int) -> Schema:
    return {
        "description": ERRORS[status],
        "headers": _headers(has_retry=status in _HAVE_RETRY),
        "content": {_JSON: {"schema": reference(ErrorBody)}},
    }


def _headers(has_retry: bool = False) -> Schema:
    text = {"type": "string"}
    headers = {"x-request-id": {"description": "In the log too.", "required": True, "schema": text}}
    if has_retry:
        meaning = "Seconds after which to try again."
        headers["retry-after"] = {"description": meaning, "required": True, "schema": text}
    return headers


def _components(kinds: Iterable[type[msgspec.Struct]], is_reply: bool) -> dict[str, Schema]:
    """Return schemas of structs and of those in them. A reply always has all fields that cannot be
    UNSET; a struct of a request takes further keys unless it forbids them."""
    structs = list(dict.fromkeys(part for kind in kinds for part in _structs(kind)))
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    for kind in structs:
        schema = schemas[kind.__name__]
        names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
        for name, meaning in field_docs(kind).items():
            schema["properties"][names[name]].setdefault("description", meaning)
        if not is_reply:
            schema.setdefault("additionalProperties", True)
        else:
            hints = get_type_hints(kind)
            tag = kind.__struct_config__.tag_field
            schema["required"] = [] if tag is None else [tag]
            schema["required"] += [
                names[name]
                for name in hints
                if UnsetType not in {hints[name], *get_args(hints[name])}
            ]
    return schemas


def _structs(hint: Any, around: tuple[Any, ...] = ()) -> Iterator[type[msgspec.Struct]]:
    """Every struct in an annotation, those in its fields included; not again those `around` it."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in around:
        yield hint
        for inner in get_type_hints(hint, include_extras=True).values():
            yield from _structs(inner, (*around, hint))
    for part in get_args(hint):
        yield from _structs(part, around)


def _request(body: BodySchema) -> dict[str, Schema]:
    """The schema of a body, and those of what is in it."""
    hints = get_type_hints(body.kind, include_extras=True)
    properties: dict[str, Schema] = {}
    required = []
    parts: list[type[msgspec.Struct]] = []
    for field in sorted(msgspec.structs.fields(body.kind), key=partial(_place, body.kind)):
        forms = body.forms.get(field.name, (hints[field.name],))
        schema = _any_of(forms, has_null=not field.required)
        schema["description"] = _meaning(body.kind, field.name, forms[0])
        if field.required:
            required.append(field.encode_name)
        elif field.default_factory is not NODEFAULT:
            schema["default"] = field.default_factory()
        elif field.default is not None:
            schema["default"] = field.default
        properties[field.encode_name] = schema
        parts += [part for form in forms for part in _structs(form)]
    only = "Accepted only at a value that asks for nothing."
    for name in body.neutral.keys() - properties.keys():
        properties[name] = {"enum": [*body.neutral[name], None], "description": only}
    name = body.kind.__name__
    whole = {"title": name, "type": "object", "properties": properties, "required": required}
    if body.kind.__doc__:
        whole["description"] = body.kind.__doc__.strip().split("\n\n")[0]
    # A null is as if it were not given, whatever it is of.
    whole["additionalProperties"] = {"type": "null"}
    return _components(parts, is_reply=False) | {name: whole}


def _place(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> tuple[bool, int]:
    """Required fields come first, and those of one request before those that several share."""
    is_own = [field.name in vars(base).get("__annotations__", ()) for base in kind.__mro__]
    return not field.required, is_own.index(True)


def _any_of(forms: Iterable[Any], has_null: bool) -> Schema:
    """Any of the forms, or null; one schema if there is one form."""
    schemas, _ = msgspec.json.schema_components(list(forms), ref_template=_REFERENCE)
    null = {"type": "null"}
    options: list[Schema] = []
    for schema in schemas:
        options += schema.pop("anyOf", [schema])
    options = [dict(option) for option in options if option != null]
    for option in options:
        option.pop("description", None)
    if has_null and len(options) == 1 and "type" in options[0]:
        options[0]["type"] = [options[0]["type"], "null"]
    elif has_null and len(options) == 1 and "enum" in options[0]:
        options[0]["enum"] = [*options[0]["enum"], None]
    elif has_null:
        options.append(null)
    return options[0] if len(options) == 1 else {"anyOf": options}
