"""A JSON schema, checked keyword by keyword and written as llguidance reads it.

llguidance overlooks a keyword that it does not know, rounds large numbers and refuses most `oneOf`.
So what reaches it is written anew, of keywords that this file knows and of what references reach;
any other keyword is refused by its place. `oneOf` becomes `anyOf` where its branches exclude each
other. What is not written as asked allows less, never more.
"""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import unquote

from srm.engine.constraints.pattern import FORMATS, LONG_FORMATS, portable
from srm.engine.constraints.schema_bounds import LARGEST, bound_schema
from srm.engine.constraints.schema_facts import TYPES, Schema, endless, exclude_each_other
from srm.engine.constraints.trial import all_matches, is_possible
from srm.errors import InvalidRequest, cut, did_you_mean

MAX_DEPTH = 100
"""Most objects and lists in each other."""
MAX_VALUES = 10_000
"""Most values of all enums together."""
MAX_DEFINITIONS = 1_000
"""Most schemas that references lead to."""
NUMBER_FORMATS = {
    "int32": (-(2**31), 2**31 - 1),
    **dict.fromkeys(("int64", "float", "double"), (-LARGEST, LARGEST)),
}
"""Formats of numbers, as OpenAPI has them, and their lowest and highest ones. Those beyond LARGEST
are left out."""

_ONE_SCHEMA = ("items", "additionalProperties")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties")
_SIZES = "minItems maxItems minLength maxLength minProperties maxProperties".split()
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_VALUES = ("type", "enum", "const", "required", "pattern", "format", "multipleOf", "$ref")
KEYWORDS = frozenset(
    (*_ONE_SCHEMA, *_SCHEMAS, *_NAMED_SCHEMAS, *_SIZES, *_LOWER, *_UPPER, *_VALUES)
) | {"additionalItems"}
ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id "
    "id $anchor $defs definitions discriminator "
    "externalDocs xml markdownDescription enumDescriptions markdownEnumDescriptions enumNames "
    "deprecationMessage markdownDeprecationMessage errorMessage patternErrorMessage "
    "defaultSnippets doNotSuggest suggestSortText allowComments allowTrailingCommas".split()
)
"""Keywords that constrain nothing, of the drafts, OpenAPI and editors; so are those that begin with
x-. What is in $defs is read where
a reference leads to it."""
_IF_TRUE = ("uniqueItems", "nullable")
"""Keywords that are not supported, but where they are false they say nothing."""
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
HINTS = {
    "nullable": 'write "type" as a list with "null"',
    "not": "write what is allowed",
    **dict.fromkeys(
        ("uniqueItems", "contains", "minContains", "maxContains"),
        "leave it out and check the reply",
    ),
    **dict.fromkeys(("contentMediaType", "contentEncoding"), "write pattern"),
    **dict.fromkeys(("if", "then", "else", "dependencies"), "write anyOf"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), "write anyOf"),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef"), "write $ref"),
    "propertyNames": "write patternProperties and additionalProperties = false",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
    "x-guidance": "leave it out",
}
"""What to write instead of keywords that are not supported."""
Path = tuple[str, ...]
_NONE: frozenset[str] = frozenset()


def normalize_schema(
    schema: Any,
    strict: bool,
    not_enforced: list[str] | None = None,
    without: frozenset[str] = _NONE,
) -> dict[str, Any]:
    """Return the schema for llguidance, without some keywords.

    What cannot be held is left out if there is a list that gets its place, a JSON pointer. Else it
    raises InvalidRequest, which begins with the place; so does what nothing can meet.
    """
    writer = _Writer(schema, not_enforced, without)
    root = writer.write(schema, ())
    while writer.unwritten:
        path, reference = writer.unwritten.pop()
        writer.definitions[reference] = writer.write(writer.resolve(path), path)
    writer.name_finite_patterns()
    if isinstance(root, bool):
        root = {} if root else {"enum": []}
    everything = {**writer.definitions, "#": root}
    for place, branches, beside in writer.one_ofs:
        if pair := exclude_each_other(branches, beside, everything):
            writer.refuse(
                place,
                f"its branches {pair[0]} and {pair[1]} may both hold; they must exclude each "
                "other, by type or by a required property with const or enum: else write anyOf",
            )
    if root.get("enum") == [] or "#" in endless(everything):
        raise _fault((), "no JSON text that ends can meet it")
    joining = bound_schema(root, writer.definitions, strict)
    if strict:
        writer.check_joined({id(schema) for schema in joining})
    definitions = {ref.rpartition("/")[2]: body for ref, body in writer.definitions.items()}
    return {**root, "$defs": definitions} if definitions else root


def _pointer(path: Path) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def _fault(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest(f"{cut(_pointer(path) or 'the schema', 300)}: {what}")


def _show(value: Any) -> str:
    return cut(repr(value), 80)


class _Writer:
    """Writes schemas of one document."""

    def __init__(self, root: Any, not_enforced: list[str] | None, without: frozenset[str]) -> None:
        self.definitions: dict[str, Schema] = {}
        """By the reference that is written to them."""
        self.unwritten: list[tuple[Path, str]] = []
        self.one_ofs: list[tuple[Path, list[Schema], Schema]] = []
        """Of each oneOf its place, its branches and what else its schema says."""
        self._root = root
        self._not_enforced = not_enforced
        self._without = without
        self._joined: list[tuple[Path, dict[str, Any]]] = []
        """Schemas that join others, and their places."""
        self._references: dict[Path, str] = {}
        self._num_values = 0
        self._names: dict[str, None] = {}
        """Of all properties of the document."""
        self._with_patterns: list[dict[str, Any]] = []
        """Schemas that have patternProperties."""

    def resolve(self, path: Path) -> Any:
        """Return what is at a place of the document. Raises KeyError, IndexError, ValueError."""
        value = self._root
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    def refuse(self, path: Path, what: str) -> None:
        """Raise what is wrong with this place, or note that it is not enforced."""
        if self._not_enforced is None:
            raise _fault(path, what)
        self._not_enforced.append(_pointer(path))

    def write(self, schema: Any, path: Path) -> Schema:
        """Return the schema at this place as llguidance is to read it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.refuse(path, f"must be an object, true or false; got {_show(schema)}")
            return True
        if len(path) > MAX_DEPTH:
            self.refuse(path[:8], f"it nests deeper than {MAX_DEPTH}")
            return True
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            try:
                if not self._is_annotation(keyword, path, value):
                    self._write_keyword(written, schema, keyword, path)
            except InvalidRequest:
                if self._not_enforced is None:
                    raise
                self._not_enforced.append(_pointer((*path, keyword)))
        self._write_together(written, schema, path)
        return written

    def name_finite_patterns(self) -> None:
        """Write patterns that match names of the document alone as these names.

        llguidance reads a pattern as all names that it matches but those listed. Where there are
        none, it allows the beginning of a name that has no end.
        """
        matches: dict[str, list[str] | None] = {}
        for written in self._with_patterns:
            for pattern, value in list(written["patternProperties"].items()):
                if pattern not in matches:
                    matches[pattern] = all_matches(pattern, self._names)
                if (names := matches[pattern]) is not None:
                    del written["patternProperties"][pattern]
                    named = written.setdefault("properties", {})
                    for name in names:
                        own = named.get(name)
                        named[name] = value if own is None else {"allOf": [own, value]}
            if not written["patternProperties"]:
                del written["patternProperties"]

    def _is_annotation(self, keyword: str, path: Path, value: Any) -> bool:
        if keyword in self._without:
            raise _fault((*path, keyword), "it is not enforced")
        if keyword in KEYWORDS:
            return False
        if keyword in ("$id", "id") and path:
            raise _fault((*path, keyword), "only the whole schema may have an id")
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            return True
        if value is False and keyword in _IF_TRUE:
            return True
        hint = HINTS.get(keyword)
        meant = f"; {hint}" if hint else did_you_mean(keyword, KEYWORDS)
        meant = meant or "; leave it out, or begin its name with x-"
        raise _fault((*path, keyword), f"this keyword is not supported{meant}")

    def _write_keyword(
        self, written: dict[str, Any], schema: dict[str, Any], keyword: str, path: Path
    ) -> None:
        at, value = (*path, keyword), schema[keyword]
        if keyword == "items" and isinstance(value, list):  # as it was before 2020
            written["prefixItems"] = self._write_all(value, at)
        elif keyword == "additionalItems":
            if not isinstance(schema.get("items"), list):
                raise _fault(at, "it has a meaning only beside a list of items")
            written["items"] = self.write(value, at)
        elif keyword in _ONE_SCHEMA:
            written[keyword] = self.write(value, at)
        elif keyword in _SCHEMAS:
            written[keyword] = self._write_all(value, at)
        elif keyword in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise _fault(at, f"must be an object; got {_show(value)}")
            is_pattern = keyword == "patternProperties"
            written[keyword] = {
                (_pattern if is_pattern else _utf8)(name, at): self.write(item, (*at, name))
                for name, item in value.items()
            }
            if len(written[keyword]) < len(value):
                raise _fault(at, "two patterns mean the same: write one")
            if is_pattern:
                self._with_patterns.append(written)
            else:
                self._names.update(dict.fromkeys(value))
        elif keyword == "$ref":
            written[keyword] = self._reference(value, at)
        else:
            written[keyword] = self._value(keyword, value, at)

    def _write_all(self, value: Any, at: Path) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise _fault(at, f"must be a list of at least one schema; got {_show(value)}")
        return [self.write(item, (*at, str(index))) for index, item in enumerate(value)]

    def _reference(self, value: Any, at: Path) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise _fault(at, f"must be '#' or '#/' and a place in this schema; got {_show(value)}")
        parts = unquote(value[1:]).split("/")[1:]
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
        if path not in self._references:
            try:
                self.resolve(path)
            except (KeyError, IndexError, ValueError, TypeError):
                raise _fault(at, f"{_show(value)} is not in this schema") from None
            if len(self._references) == MAX_DEFINITIONS:
                raise _fault(at, f"references lead to more than {MAX_DEFINITIONS} schemas")
            name = f"#/$defs/{len(self._references)}"
            self._references[path] = name
            self.unwritten.append((path, name))
        return self._references[path]

    def _value(self, keyword: str, value: Any, at: Path) -> Any:
        """Return the value of a keyword that has no schemas in it."""
        match keyword:
            case "type":
                types = value if isinstance(value, list) else [value]
                if not types or not all(isinstance(name, str) and name in TYPES for name in types):
                    raise _fault(at, f"must be of {', '.join(TYPES)}; got {_show(value)}")
            case "enum":
                if not isinstance(value, list) or not value:
                    raise _fault(at, f"must be a list of at least one value; got {_show(value)}")
                self._num_values += len(value)
                if self._num_values > MAX_VALUES:
                    raise _fault(at, f"enums have more than {MAX_VALUES} values together")
                _check_exact(value, at)
            case "const":
                _check_exact(value, at)
            case "required":
                if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
                    raise _fault(at, f"must be a list of strings; got {_show(value)}")
                names = {_utf8(name, at): None for name in value}
                self._names.update(names)
                return list(names)
            case "pattern":
                if not isinstance(value, str):
                    raise _fault(at, f"must be a string; got {_show(value)}")
                return _pattern(value, at)
            case "format":
                known = (*FORMATS, *NUMBER_FORMATS)
                if not isinstance(value, str) or value not in known:
                    raise _fault(at, f"must be of {', '.join(known)}; got {_show(value)}")
            case "multipleOf":
                if not _is_number(value) or not 0 < value <= LARGEST:
                    raise _fault(at, f"must be a number above 0, at most 2**53; got {_show(value)}")
            case name if name in _SIZES:
                if not _is_number(value) or value < 0 or int(value) != value or value > 2**31:
                    raise _fault(at, f"must be an integer from 0 to 2**31; got {_show(value)}")
                return int(value)
            case _:
                return _bound(keyword, value, at)
        return value

    def _write_together(self, written: dict[str, Any], schema: Any, path: Path) -> None:
        """Write what depends on several keywords of one schema."""
        if "patternProperties" in schema and "patternProperties" not in written:
            written.pop("additionalProperties", None)  # which would forbid what the patterns name
        for exclusive, bound in zip(
            ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "maximum"), strict=True
        ):
            is_flag = isinstance(written.get(exclusive), bool)  # as it was in draft 4
            if is_flag and written.pop(exclusive) and bound in written:
                try:
                    written[exclusive] = _bound(exclusive, written.pop(bound), (*path, bound))
                except InvalidRequest as error:
                    self.refuse((*path, bound), error.message.partition(": ")[2])
        if (least := written.get("minProperties", 0)) > 1:
            if least > len(written.get("required", [])):
                self.refuse(
                    (*path, "minProperties"), "more than 1 must be in required: write their names"
                )
            del written["minProperties"]
        if written.get("format") in NUMBER_FORMATS and (fault := _bound_by_format(written)):
            self.refuse((*path, "format"), fault)
        further = []
        if more := _format_pattern(written):
            if "pattern" in written:
                further.append({"pattern": more})
            else:
                written["pattern"] = more
        if branches := written.pop("oneOf", None):
            self.one_ofs.append(((*path, "oneOf"), branches, dict(written)))
            if "anyOf" in written:
                further.append({"anyOf": branches})
            else:
                written["anyOf"] = branches
        if further:
            written["allOf"] = [*written.get("allOf", []), *further]
        if joins := [name for name in ("$ref", "allOf", "anyOf") if name in written]:
            self._joined.append(((*path, joins[0]), written))

    def check_joined(self, joining: set[int]) -> None:
        """Refuse joined objects that are not written as one, by their ids."""
        for path, written in self._joined:
            is_object = "properties" in written or len(written.get("allOf", [])) > 1
            if is_object and id(written) in joining:
                raise _fault(
                    path,
                    "with strict, objects have only the properties that they name, so what joins "
                    "several objects to one allows nothing: write their properties in one place",
                )


def _format_pattern(written: dict[str, Any]) -> str:
    """Return the pattern that a string's format asks for, beside what llguidance does."""
    name = written.get("format", "")
    keywords = ("format", "pattern", "minLength", "maxLength")
    own = {"type": "string"} | {own: written[own] for own in keywords if own in written}
    if name not in LONG_FORMATS or len(own) == 2:
        return FORMATS.get(name, "")
    is_met = is_possible({**own, "allOf": [{"pattern": FORMATS[name]}]})
    return (FORMATS if is_met else LONG_FORMATS)[name]


def _bound_by_format(written: dict[str, Any]) -> str:
    """Write the format of a number as its bounds. Return what is wrong with it; empty: nothing."""
    name, types = written.pop("format"), written.get("type", "")
    names = [types] if isinstance(types, str) else types
    if "string" in names or not {"integer", "number"} & {*names}:
        return f'{name} is one of numbers: write "type" as integer or number'
    if name.startswith("int"):
        written["type"] = ["integer" if own == "number" else own for own in names]
    low, high = NUMBER_FORMATS[name]
    written["minimum"] = max(low, written.get("minimum", low))
    written["maximum"] = min(high, written.get("maximum", high))
    return ""


def _utf8(text: str, at: Path) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise _fault(at, "it has half of a surrogate pair, which is no text")
    return text


def _pattern(pattern: str, at: Path) -> str:
    return portable(_utf8(pattern, at), lambda what: _fault(at, what))


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))


def _check_exact(value: Any, at: Path) -> None:
    """Refuse values that would be written otherwise than they are."""
    if isinstance(value, str):
        if control := _CONTROL.search(_utf8(value, at)):
            raise _fault(at, f"it has the control character {control[0]!r}, which is never made")
    elif isinstance(value, list):
        for item in value:
            _check_exact(item, at)
    elif isinstance(value, dict):
        for name, item in value.items():
            _utf8(name, at)
            _check_exact(item, at)
    elif (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not abs(value) <= LARGEST  # so that nan is none of them
    ):
        raise _fault(at, f"numbers must be from -2**53 to 2**53; got {_show(value)}")


def _bound(keyword: str, value: Any, at: Path) -> Any:
    is_exclusive = keyword.startswith("exclusive")
    if isinstance(value, bool) and is_exclusive:
        return value
    if not _is_number(value):
        raise _fault(at, f"must be a number; got {_show(value)}")
    if abs(value) <= LARGEST - is_exclusive:
        return value
    if (value > 0) == (keyword in _LOWER):
        span = "between -2**53 and 2**53" if is_exclusive else "from -2**53 to 2**53"
        raise _fault(at, f"must be {span}; got {_show(value)}")
    return LARGEST if value > 0 else -LARGEST
