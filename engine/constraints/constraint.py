"""From what a caller may ask of a completion to a grammar that llguidance compiles.

Each function returns `SamplingParams.constraint`, or raises InvalidRequest, whose message begins
with the place at fault, a JSON pointer into the schema. Nothing is compiled here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from srm.engine.constraints.json_schema import normalize_schema
from srm.engine.constraints.trial import NOTHING
from srm.errors import InvalidRequest

HARD_KEYWORDS = frozenset(
    "additionalProperties patternProperties minProperties maxProperties pattern format multipleOf "
    "allOf".split()
)
"""Keywords that a schema may use in ways that llguidance does not compile."""
MAX_REGEX = 20_000
"""Most characters of a regex."""
MAX_GRAMMAR = 100_000
"""Most characters of a Lark grammar, and of all choices together."""
_MAX_DIGITS = 1_000
"""Most digits of a number in a schema."""
_ESCAPES = 'nrbtf\\"'
"""Escapes of strings: without \\uXXXX each text has one spelling, so no name of a property has
another one that evades its schema."""
_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.M)
"""A rule of EBNF, which Lark has with one colon."""
_UNHONOURED = re.compile(r"%json\b|%llguidance\b|\[[^\]\n]*\b(?:temperature|stop_capture)\b")
"""What a Lark grammar of llguidance may have and is not honoured here."""


def read_json(text: bytes | str) -> Any:
    """Return what the JSON says. Raises InvalidRequest for a key that an object has twice and for
    NaN, ValueError for what is no JSON, and RecursionError."""
    return json.loads(
        text, object_pairs_hook=_object, parse_int=_int, parse_constant=_refuse_constant
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"an object has {twice!r:.80} twice")
    return fields


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise InvalidRequest(f"a number has {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is no JSON")


def json_constraint(schema: dict[str, Any] | bool, strict: bool = False, space: str = "") -> str:
    """Completions are JSON that the schema allows, with `space` after each comma and colon.

    With `strict`, objects have only the properties that their schemas name.
    """
    return _json_grammar(normalize_schema(schema, strict), space)


def can_be_followed(constraint: str) -> str:  # noqa: ARG001
    """Take a constraint for one that can be followed, where that is tried later."""
    return ""


def lenient_json_constraint(
    schema: Any, space: str, not_enforced: list[str], why_not: Callable[[str], str]
) -> str:
    """As `json_constraint`, but what cannot be held is left out, and its place added to the list.

    `why_not` says of a constraint why it cannot be followed; empty: it can. Raises InvalidRequest
    for a schema that nothing can meet.
    """
    for without in (frozenset[str](), HARD_KEYWORDS):
        places: list[str] = []
        constraint = _json_grammar(normalize_schema(schema, False, places, without), space)
        fault = why_not(constraint)
        if fault.startswith(NOTHING):
            raise InvalidRequest(fault)
        if not fault:
            not_enforced += places
            return constraint
    not_enforced.append("")
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return json_constraint({"type": "object"} if is_object else True, space=space)


def _json_grammar(schema: dict[str, Any], space: str) -> str:
    options = {
        "whitespace_flexible": False,
        "item_separator": f",{space}",
        "key_separator": f":{space}",
        "json_allowed_escapes": _ESCAPES,
    }
    return _grammar("json_schema", {**schema, "x-guidance": options})


def regex_constraint(regex: str) -> str:
    """Completions match the regex from the first to the last character; \\d, \\w and \\s are ASCII,
    as in RE2."""
    if not 0 < len(regex) <= MAX_REGEX:
        raise InvalidRequest(f"it must have 1 to {MAX_REGEX} characters; got {len(regex)}")
    return _grammar("lark_grammar", f"start: /{regex_to_lark(_text(regex), 'dws')}/")


def choice_constraint(choices: Sequence[str]) -> str:
    """Completions are one of these texts."""
    if not choices or not all(choices):
        raise InvalidRequest("it must be a list of texts, at least one and none of them empty")
    if (total := sum(map(len, choices))) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"the choices have {total} characters; at most {MAX_GRAMMAR} are taken"
        )
    texts = (json.dumps(_text(text), ensure_ascii=False) for text in dict.fromkeys(choices))
    return _grammar("lark_grammar", "start: CHOICE\nCHOICE: " + " | ".join(texts))


def lark_constraint(grammar: str) -> str:
    """Completions are what the rule `start` of a Lark grammar derives, or `root` of one in EBNF."""
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"it has {len(grammar)} characters; at most {MAX_GRAMMAR} are taken")
    if _EBNF.search(grammar):
        try:
            grammar = gbnf_to_lark(grammar).removeprefix("%llguidance {}")
        except Exception as error:  # noqa: BLE001 - the library's, which has no class for most
            raise InvalidRequest(f"it is no EBNF: {error!s:.200}") from None
    if unhonoured := _UNHONOURED.search(grammar):
        raise InvalidRequest(f"{unhonoured[0].split()[0][:40]!r} is not supported in a grammar")
    return _grammar("lark_grammar", _text(grammar))


def _grammar(kind: str, value: object) -> str:
    return json.dumps({"grammars": [{kind: value}]}, ensure_ascii=False, separators=(",", ":"))


def _text(text: str) -> str:
    """Return a text that UTF-8 has. Raises InvalidRequest for another one."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest("it has half of a surrogate pair, which is no text")
    return text
