"""The grammar of a reply that calls tools, of JSON schemas of their arguments.

A call of the only function is its arguments. A call of one of several, or one of several calls, is
an object of name and arguments, and all of it but these is fixed. Each schema is a grammar of its
own, so that its references stay in it. Text in place of calls begins with no brace or bracket.
"""

from __future__ import annotations

import json
from typing import Any

from srm.engine.constraints.constraint import json_constraint
from srm.engine.errors import InvalidRequest
from srm.server.schema.tools import CALL_HEAD, MOST_CALLS

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_constraint(calls: dict[str, Any]) -> str:
    """Return the constraint of a reply that makes these calls, a `server.schema.tools.Calls`.
    Raises InvalidRequest naming the place in a schema."""
    functions = calls["functions"]
    arguments = [_arguments_constraint(function) for function in functions]
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


def _arguments_constraint(function: dict[str, Any]) -> str:
    """Arguments that are not named are not written, unless `strict` is false."""
    parameters = function.get("parameters")
    schema = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    try:
        return json_constraint(schema, strict=function.get("strict") is not False)
    except InvalidRequest as error:
        raise InvalidRequest(f"parameters of {function['name']}: {error.message}") from None
