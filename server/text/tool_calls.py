"""The grammar of a reply that calls tools, of JSON schemas of their arguments.

A call of the only function is its arguments. A call of one of several, or one of several calls, is
an object of name and arguments, and all of it but these is fixed. Each schema is a grammar of its
own, so that its references stay in it. Text in place of calls begins with no brace or bracket.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from srm.engine.constraints.constraint import (
    can_be_followed,
    json_constraint,
    lenient_json_constraint,
)
from srm.errors import InvalidRequest
from srm.server.schema.tools import CALL_HEAD, MOST_CALLS


def call_constraint(
    calls: dict[str, Any], not_enforced: list[str], why_not: Callable[[str], str] = can_be_followed
) -> str:
    """Return the constraint of a reply that makes these calls, a `server.schema.tools.Calls`.

    What cannot be held of functions that are not strict is left out, and its place added to
    `not_enforced`; `why_not` says of a constraint why it cannot be followed. Raises InvalidRequest
    naming the place in a schema.
    """
    functions = calls["functions"]
    arguments = [_arguments_constraint(own, not_enforced, why_not) for own in functions]
    may_be_text = calls.get("may_be_text", False)
    if len(functions) == 1 and not (calls["are_several"] or may_be_text):
        return arguments[0]
    ways = [
        f'{json.dumps(CALL_HEAD.format(function["name"]))} @arguments{i} "}}"'
        for i, function in enumerate(functions)
    ]
    rest = f'("," call){{0,{MOST_CALLS - 1}}} "]"'
    start = f'"[" call {rest}' if calls["are_several"] else "call"
    if may_be_text:
        start = f"(calls | TEXT)?\ncalls: {start}\nTEXT: /[^\\[{{](.|\\n)*/"
    lark = f"start: {start}\ncall: {' | '.join(ways)}\n"
    named = [
        json.loads(own)["grammars"][0] | {"name": f"arguments{i}"}
        for i, own in enumerate(arguments)
    ]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *named]})


def _arguments_constraint(
    function: dict[str, Any], not_enforced: list[str], why_not: Callable[[str], str]
) -> str:
    schema = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    name, places = function["name"], list[str]()
    try:
        if function.get("strict"):
            constraint = json_constraint(schema, strict=True)
            if fault := why_not(constraint):
                raise InvalidRequest(fault)
        else:
            constraint = lenient_json_constraint(schema, "", places, why_not)
    except InvalidRequest as error:
        raise InvalidRequest(f"parameters of {name}: {error.message}") from None
    not_enforced += [f"{name}{place}" for place in places]
    return constraint
