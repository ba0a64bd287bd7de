"""Fields that say what a completion may be: `response_format`, as OpenAI has it,
`structured_outputs`, as vLLM has it, and `json_schema`, `regex` and `ebnf`, as SGLang has them.

Schemas stay JSON here: `server.text.constraint_process` reads them, which may be killed.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from srm.errors import InvalidRequest
from srm.server.schema.json_parts import to_json
from srm.server.schema.until import WantedSamples

Kind = Literal["json", "regex", "choice", "grammar", "calls"]

_NAME = r"^[a-zA-Z0-9_-]{1,64}\Z"
_KINDS: dict[str, Kind] = {
    "json": "json",
    "json_object": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_SGLANG_KINDS: dict[str, Kind] = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_NULL = Raw(b"null")
_OBJECT = to_json({"type": "object"})


def _copy_raw(struct: msgspec.Struct, name: str) -> None:
    """Have a field hold its own JSON: a view would keep the whole body as long as the request."""
    msgspec.structs.force_setattr(struct, name, getattr(struct, name).copy())


class ConstraintSource(msgspec.Struct, frozen=True):
    """What a request says of its completions' form, before anything is made of it."""

    field: str
    """The field that says so, for errors."""
    kind: Kind
    value: Raw
    """Its JSON, which nobody has read."""
    strict: bool = False
    """Objects have only the properties that their schemas name."""
    space: str = ""
    """What follows commas and colons of JSON."""
    is_lenient: bool = False
    """What cannot be held of a schema is not enforced; else it is refused."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What constraints are made for: the bytes of each token."""

    tokens: list[bytes]
    end_ids: list[int]
    """Tokens that end a text."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Raw
    """A JSON schema."""
    name: Annotated[str, Meta(pattern=_NAME)] | None = None
    """Accepted and not used."""
    description: str | None = None
    """Accepted and not used."""
    strict: bool | None = None
    """true: objects have only the properties that the schema names; false: what cannot be held of
    the schema is not enforced, and named in x-srm-not-enforced."""

    def __post_init__(self) -> None:
        _copy_raw(self, "schema")


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON that a schema allows."""
    json_schema: JsonSchemaFormat | None = None
    """With type = json_schema."""


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    json: Raw = msgspec.field(default_factory=lambda: _NULL)
    """A JSON schema, or one as text."""
    json_object: bool | None = None
    """true: any JSON object."""
    regex: str | None = None
    """A regex, of the whole completion."""
    choice: list[str] | None = None
    """Texts, one of which is the completion."""
    grammar: str | None = None
    """A grammar in Lark's notation, or in EBNF."""
    whitespace_pattern: Literal["", " "] | None = None
    """What follows commas and colons of JSON: nothing, or one space."""
    disable_any_whitespace: bool | None = None
    """true, as ever: there is no other whitespace."""
    disable_additional_properties: bool | None = None
    """Objects have only the properties that the schema names."""
    structural_tag: None = None

    def __post_init__(self) -> None:
        _copy_raw(self, "json")


SUCCESSORS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "no other: there is one way",
    "grammar": "structured_outputs.grammar",
}
"""Fields of earlier vLLM and llama.cpp, with what says the same here."""


class ConstrainedRequest(WantedSamples, frozen=True, kw_only=True):
    """The fields of requests about the form of completions."""

    successors: ClassVar = {name: f"its name is {own}" for name, own in SUCCESSORS.items()}
    response_format: (
        Annotated[
            ResponseFormat,
            Meta(
                description="an object with type: text, json_object or json_schema; with the last, "
                "json_schema: an object with schema, and name, description and strict, if any"
            ),
        ]
        | None
    ) = None
    """The form of completions: text, a JSON object or a JSON schema."""
    structured_outputs: (
        Annotated[
            StructuredOutputs,
            Meta(
                description="an object with one of json, json_object: true, regex, choice and "
                "grammar; whitespace_pattern: '' or one space; disable_any_whitespace: true; "
                "disable_additional_properties: true or false"
            ),
        ]
        | None
    ) = None
    """The form of completions: a schema, regex, choice or grammar."""

    json_schema: str | None = None
    """The form of completions, as SGLang has it: a JSON schema as text."""
    regex: str | None = None
    """The same: a regex."""
    ebnf: str | None = None
    """The same: a grammar in EBNF, whose rule `root` is the completion."""

    def constraint_source(self) -> ConstraintSource | None:
        """Return what completions must be; None: any text. Raises InvalidRequest."""
        form, outputs = self.response_format, self.structured_outputs
        sources = [] if outputs is None else [_of_outputs(outputs)]
        for name, kind in _SGLANG_KINDS.items():
            if (value := getattr(self, name)) is not None:
                sources.append(ConstraintSource(name, kind, to_json(value)))
        if form is not None and (asked := _of_format(form)) is not None:
            sources.append(asked)
        if len(sources) > 1:
            first, other = (source.field.partition(".")[0] for source in sources[:2])
            raise InvalidRequest(
                f"{first} and {other} both say what completions are: send one of them", first
            )
        return sources[0] if sources else None


def _of_format(form: ResponseFormat) -> ConstraintSource | None:
    field = "response_format"
    if (form.json_schema is None) == (form.type == "json_schema"):
        raise InvalidRequest(
            f"{field}.json_schema must be there with {field}.type = json_schema, and only then; "
            f"type is {form.type}",
            field,
        )
    if form.type == "json_object":
        return ConstraintSource(f"{field}.type", "json", _OBJECT)
    if form.json_schema is None:
        return None
    schema = form.json_schema
    return ConstraintSource(
        f"{field}.json_schema.schema",
        "json",
        schema.schema,
        strict=bool(schema.strict),
        is_lenient=schema.strict is False,
    )


def _of_outputs(outputs: StructuredOutputs) -> ConstraintSource:
    field = "structured_outputs"
    given = [name for name in _KINDS if getattr(outputs, name) not in (None, _NULL)]
    if len(given) != 1 or outputs.json_object is False:
        raise InvalidRequest(
            f"{field} must have exactly one of json, json_object: true, regex, choice and grammar; "
            f"got {', '.join(given) or 'none'}",
            field,
        )
    (name,) = given
    about_json = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
    for option in about_json:
        if name not in ("json", "json_object") and getattr(outputs, option) is not None:
            raise InvalidRequest(f"{field}.{option} is about JSON, not about {name}", field)
    if outputs.disable_any_whitespace is False:
        raise InvalidRequest(
            f"{field}.disable_any_whitespace = false: whitespace is never free; whitespace_pattern "
            "= ' ' puts one space after commas and colons",
            field,
        )
    value = _OBJECT if name == "json_object" else getattr(outputs, name)
    return ConstraintSource(
        f"{field}.{name}",
        _KINDS[name],
        value if isinstance(value, Raw) else to_json(value),
        strict=bool(outputs.disable_additional_properties),
        space=outputs.whitespace_pattern or "",
    )
