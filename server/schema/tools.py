"""The tools of a chat: which functions the model may call, and which of them it must.

A call is the constraint of the text, so that any model makes one. With `auto` the first character
of a reply says whether it is one.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import InvalidRequest, cut
from srm.server.schema.json_parts import MAX_VALUE_BYTES, fields_of, first_byte, items_of, to_json
from srm.server.schema.structured_outputs import ConstraintSource
from srm.server.schema.validation import reading_item, show

MAX_TOOLS = 128
"""Most tools of one chat."""
MOST_CALLS = 16
"""Most calls of one reply."""
CALL_HEAD = '{{"name":"{}","arguments":'
"""What is before the arguments of a call, as text; behind them is one brace."""
_OBJECT = Raw(b'"object"')
_SHOWN_NAMES = 160
"""Most characters of the names of tools in an error."""
_MUST = (
    'be an object with type "function" and function, an object with name (1 to 64 of A-Z a-z 0-9 _ '
    "-) and at most description, parameters and strict"
)

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]


class Function(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What may be called; null is the same as absent."""

    name: FunctionName
    description: str | None = None
    """Shown to the model if the chat template shows tools."""
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] | UnsetType = (
        UNSET
    )
    """JSON Schema of the arguments, an object; null: it has no arguments."""
    strict: bool | None = None
    """true: what cannot be held of `parameters` is refused, and objects have only the properties
    that they name; else it is not enforced, and named in x-srm-not-enforced."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function; tools of other kinds are not called."""

    type: Literal["function"]
    function: Function


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of the one function that is called."""

    type: Literal["function"]
    function: _Named


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction,
    Meta(
        description='"none", "auto", "required", or {"type": "function", "function": {"name": …}} '
        "with the name of a tool"
    ),
]
Tools = Annotated[
    list[Tool], Meta(max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} functions")
]


class Calls(msgspec.Struct, frozen=True):
    """What a reply must or may call."""

    functions: list[Function]
    """One of these, or some of them."""
    is_named: bool
    """Whether the request names the one."""
    are_several: bool
    """Whether the reply is a list of calls."""
    may_be_text: bool = False
    """Whether the model may answer with text instead, which does not begin as calls do."""

    @property
    def source(self) -> ConstraintSource:
        """What makes a reply these calls."""
        return ConstraintSource("tools", "calls", to_json(self))

    @property
    def is_one_function(self) -> bool:
        """Whether the text is the arguments alone, since all else is known."""
        return len(self.functions) == 1 and not (self.are_several or self.may_be_text)

    def is_text(self, beginning: str) -> bool:
        """Whether a reply that begins so is text, and no call."""
        return self.may_be_text and not beginning.startswith(("{", "["))


def required_calls(
    tools: list[Tool], choice: str | NamedFunction | None, is_parallel: bool | None
) -> Calls | None:
    """Return what a reply must or may call, or None. Raises InvalidRequest if that cannot be."""
    if not tools and choice not in (None, "auto", "none"):
        raise InvalidRequest(
            f"tool_choice = {show(choice)} needs tools, which are missing", "tool_choice"
        )
    if not tools or choice == "none":
        return None
    functions = [tool.function for tool in tools]
    is_named = isinstance(choice, NamedFunction)
    if isinstance(choice, NamedFunction):
        functions = [own for own in functions if own.name == choice.function.name]
        if not functions:
            names = ", ".join(tool.function.name for tool in tools)
            raise InvalidRequest(
                f"tool_choice.function.name = {show(choice.function.name)} is not in tools: "
                f"{cut(names, _SHOWN_NAMES)}",
                "tool_choice",
            )
    may_be_text = not is_named and choice != "required"
    return Calls(functions, is_named, bool(is_parallel) and not is_named, may_be_text)


def tools_of(given: dict[str, Raw]) -> list[Tool]:
    """The field `tools` of a body. Raises InvalidRequest naming the tool at fault."""
    value = given.get("tools", Raw(b"[]"))
    may_be = first_byte(value) == b"[" and len(value) <= MAX_VALUE_BYTES
    items = items_of(value, MAX_TOOLS) if may_be else None
    if items is None:
        raise InvalidRequest(
            f"tools must be a list of at most {MAX_TOOLS} functions, in at most {MAX_VALUE_BYTES} "
            f"bytes; got {show(value)}",
            "tools",
        )
    tools: list[Tool] = []
    names: set[str] = set()
    for i, item in enumerate(items):
        tools.append(tool := _tool(item, i))
        if tool.function.name in names:
            raise InvalidRequest(
                f"tools[{i}].function.name = {show(tool.function.name)} is the name of a tool "
                "before it: each must have another",
                "tools",
            )
        names.add(tool.function.name)
    return tools


def _tool(value: Raw, i: int) -> Tool:
    with reading_item("tools", i, value, _MUST):
        tool = msgspec.json.decode(value, type=Tool)
        parameters = tool.function.parameters
        kind = _OBJECT
        if parameters is not UNSET and bytes(parameters) != b"null":
            kind = fields_of(parameters).get("type", _OBJECT)
    if bytes(kind) != bytes(_OBJECT):
        raise InvalidRequest(
            f'tools[{i}].function.parameters.type must be "object", since arguments have names; '
            f"got {show(kind)}",
            "tools",
        )
    return tool
