"""The bodies of POST /v1/messages and of the count of its tokens, checked field by field.

A message is the next one of a chat: `parse_message` makes that of turns and tools.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, field

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import ChatRequest, chat_of
from srm.server.schema.completion_response import NULL
from srm.server.schema.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    Message,
    ReasoningEffort,
    messages_of,
    read_arguments,
)
from srm.server.schema.json_parts import AnyJson, fields_of, first_byte, items_of, to_json
from srm.server.schema.sampling_fields import (
    MAX_STOPS,
    NEUTRAL,
    Probability,
    Stop,
    StreamOptions,
    Temperature,
    TopK,
)
from srm.server.schema.validation import (
    Fields,
    checked,
    given_fields,
    list_items,
    naming,
    reading_item,
    require,
    show,
)

JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class TextParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"]
    cache_control: AnyJson = UNSET
    """Passed over, as all prompts are cached; and so is the next."""
    citations: AnyJson = UNSET


class BlockParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text, a call of a tool, or what it returned; null is the same as absent."""

    type: Literal["text", "tool_use", "tool_result"]
    text: str | None = None
    id: str | None = None
    """Of a call."""
    name: str | None = None
    """Of the tool that is called."""
    input: JsonObject = field(default_factory=lambda: NULL)
    """Of a call."""
    tool_use_id: str | None = None
    """The id of the call that returned this."""
    content: str | list[TextParam] | None = None
    """What it returned."""
    is_error: bool | None = None
    """Whether that is an error, of which the model is told."""
    cache_control: AnyJson = UNSET
    """Passed over; and so are the next."""
    citations: AnyJson = UNSET
    caller: AnyJson = UNSET


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[BlockParam]
    """A text, or blocks. The answer goes on where the last turn is the assistant's."""


TURNS_FORMS = (
    Annotated[
        list[Turn],
        Meta(min_length=1, max_length=MAX_MESSAGES, description=f"a list of 1 to {MAX_MESSAGES}"),
    ],
)
"""Types that `messages` may have on the wire."""


class ToolParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client calls."""

    name: str
    input_schema: JsonObject
    """JSON Schema of its input, an object."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: AnyJson = UNSET
    """Passed over."""


class ToolChoiceParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: JsonOutput | None = None
    effort: ReasoningEffort | None = None


class MetadataParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None


class CountRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens, checked."""

    messages: list[Turn]
    """The turns so far."""
    model: str | None = None
    """Name of the served model; others are refused."""
    system: (
        Annotated[str | list[TextParam], Meta(description="a string or a list of texts")] | None
    ) = None
    """A system message before them."""
    tools: Annotated[
        list[ToolParam],
        Meta(
            description="a list of tools: objects with name, input_schema and at most description "
            'and strict, whose type, if any, is "custom"'
        ),
    ] = []
    """Tools that may be called; none is called here."""
    tool_choice: (
        Annotated[
            ToolChoiceParam,
            Meta(
                description="an object with type: auto, any, none, or tool, then with name; and "
                "disable_parallel_tool_use: true or false"
            ),
        ]
        | None
    ) = None
    """Whether a tool is called, and which; several only with any or auto, and `false`."""
    output_config: (
        Annotated[
            OutputParam,
            Meta(
                description="an object with format: type json_schema, and schema; and effort: low, "
                "medium, high, xhigh or max"
            ),
        ]
        | None
    ) = None
    """The form of the text; a template may read `effort`, as reasoning_effort."""
    user: str | None = None
    """Accepted and not used."""
    safety_identifier: str | None = None
    """Accepted and not used."""
    prompt_cache_key: str | None = None
    """Accepted and not used; all prompts are cached."""


_Asked = TypeVar("_Asked", bound=CountRequest)


class MessageRequest(CountRequest, frozen=True, kw_only=True):
    """Body of POST /v1/messages, checked."""

    max_tokens: Annotated[int, Meta(ge=1)]
    """Most tokens of the answer."""
    temperature: Temperature = 1.0
    """Divides the logits; below 0.0001 is greedy."""
    top_p: Probability = 1.0
    """Keep the fewest likeliest tokens of this total probability, and ties."""
    top_k: TopK = 0
    """Keep this many of the likeliest tokens, and ties."""
    stop_sequences: Annotated[
        list[Stop], Meta(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} strings")
    ] = []
    """The text ends before the first of these."""
    stream: bool = False
    """Send events as the answer is made."""
    metadata: (
        Annotated[MetadataParam, Meta(description="an object with user_id, a string")] | None
    ) = None
    """Accepted and not used."""


MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
}
"""NEUTRAL, of messages."""


_OF_CHAT = {
    "prompt": "messages",
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "parallel_tool_calls": "tool_choice",
}
"""Fields of a message by those of the chat that they become, where these have other names."""
_SHOWN_OF_CHAT = {
    "continue_final_message = true: ": "",
    "continue_final_message": "a last turn that is the assistant's",
    r"response_format(\.json_schema)?": "output_config.format",
    "max_completion_tokens": "max_tokens",
    r"\.function\.parameters": ".input_schema",
    r"\.function\.": ".",
}
"""The same in messages of errors."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NEEDED = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id"},
}
"""Fields that a block of each type has."""
_MORE = {"tool_result": {"content", "is_error"}}
"""Those that it may have, besides what is passed over."""
_OWN = {"text", "id", "name", "input", "tool_use_id", "content", "is_error"}
_MUST = (
    "have role (user or assistant) and content (text, or blocks of type text, tool_use and "
    "tool_result)"
)
_decode_turn = msgspec.json.Decoder(Turn).decode


def parse_message(body: bytes) -> ChatRequest:
    """Check the body of POST /v1/messages; return the chat that it stands for. Raises
    InvalidRequest naming field and value."""
    given = given_fields(body, MessageRequest, MESSAGE_NEUTRAL)
    require(given, "max_tokens", "an integer of at least 1")
    request = _checked(MessageRequest, given)
    converted: dict[str, Any] = {"max_completion_tokens": request.max_tokens}
    if request.stream:
        converted["stream_options"] = StreamOptions(include_usage=True)
    names = {name: name for name in ("temperature", "top_p", "top_k", "stream")}
    names["stop"] = "stop_sequences"
    same = {name: given[own] for name, own in names.items() if own in given}
    return _chat(request, same, converted)


def parse_count(body: bytes) -> ChatRequest:
    """The same of the body of POST /v1/messages/count_tokens."""
    given = given_fields(body, CountRequest, MESSAGE_NEUTRAL)
    return _chat(_checked(CountRequest, given), {}, {})


def _checked(kind: type[_Asked], given: dict[str, Raw]) -> _Asked:
    if bytes(given.get("tool_choice", b"")) == b'"none"':  # as chats have it
        given["tool_choice"] = to_json({"type": "none"})
    request = checked(kind, given, {"messages": _turns_of(given)}, MESSAGE_NEUTRAL)
    if "continue_final_message" in given and request.messages[-1].role == "assistant":
        raise InvalidRequest(
            "continue_final_message = false does not go with a last turn that is the assistant's: "
            "it is continued here",
            "continue_final_message",
        )
    return request


naming_as_here = partial(naming, _OF_CHAT, _SHOWN_OF_CHAT)
"""Has an error about the chat's field name the message's."""


def _chat(request: CountRequest, fields: dict[str, Raw], converted: dict[str, Any]) -> ChatRequest:
    """Return the chat of a message. Raises InvalidRequest naming its fields."""
    with naming_as_here():
        messages = messages_of({"messages": to_json(_messages(request.messages))})
        converted["model"] = request.model
        if request.system:
            messages.insert(0, Message("system", _text(request.system)))
        converted["messages"] = messages
        converted["continue_final_message"] = request.messages[-1].role == "assistant"
        if request.tools:
            fields["tools"] = to_json([_tool(tool) for tool in request.tools])
        if (choice := request.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            if (choice.name is None) == (choice.type == "tool"):
                raise InvalidRequest(
                    "tool_choice.name must be there with tool_choice.type = tool, and only then",
                    "tool_choice",
                )
            fields["tool_choice"] = to_json(_CHOICES.get(choice.type, named))
            converted["parallel_tool_calls"] = choice.disable_parallel_tool_use is False
        output = request.output_config or OutputParam()
        converted["reasoning_effort"] = output.effort
        if (form := output.format) is not None:
            schema = {"type": "json_schema", "json_schema": {"schema": form.schema}}
            fields["response_format"] = to_json(schema)
        return chat_of(fields, converted, ChatRequest)


def _tool(tool: ToolParam) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _text(content: str | list[TextParam] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _messages(turns: list[Turn]) -> list[dict[str, Any]]:
    """Return the messages of the chat: what a tool returned is one of its own."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn.content, str) or not turn.content:
            messages.append({"role": turn.role, "content": turn.content})
            continue
        message: dict[str, Any] = {}
        for block in turn.content:
            if block.type == "tool_result":
                message = {"role": "tool", "tool_call_id": block.tool_use_id}
                error = "Error: " * bool(block.is_error)
                messages.append(message | {"content": error + _text(block.content)})
            elif message.get("role") != turn.role:
                message = {"role": turn.role}
                messages.append(message)
            if block.type == "text":
                message.setdefault("content", []).append({"type": "text", "text": block.text})
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": bytes(block.input).decode()}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return messages


def _turns_of(given: dict[str, Raw]) -> list[Turn]:
    require(given, "messages", "a list of turns")
    what = f"a list of 1 to {MAX_MESSAGES} turns"
    turns: list[Turn] = []
    calls: set[str | None] = set()
    num_parts = num_messages = 0
    for i, item in enumerate(list_items(given["messages"], "messages", MAX_MESSAGES, what)):
        with reading_item("messages", i, item, _MUST):
            num_parts += _count_parts(item)
            if num_parts > MAX_PARTS:
                raise InvalidRequest(
                    f"messages[{i}]: messages must have at most {MAX_PARTS} blocks together",
                    "messages",
                )
            turn = _decode_turn(item)
            _check(turn)
            num_messages += 1 + _check_results(turn, i, calls)
            if num_messages > MAX_MESSAGES:
                raise InvalidRequest(
                    f"messages[{i}]: messages must have at most {MAX_MESSAGES} turns and "
                    "tool_results together",
                    "messages",
                )
            turns.append(turn)
    return turns


def _check_results(turn: Turn, i: int, calls: set[str | None]) -> int:
    """Return the number of results of the turn, and add its calls to the ids of `calls`.

    Raises InvalidRequest for a result of none of these."""
    blocks = [] if isinstance(turn.content, str) else turn.content
    calls |= {block.id for block in blocks if block.type == "tool_use"}
    results = [block.tool_use_id for block in blocks if block.type == "tool_result"]
    for id in results:
        if id not in calls:
            raise InvalidRequest(
                f"messages[{i}]: tool_use_id = {show(id)} is the id of no tool_use before it",
                "messages",
            )
    return len(results)


def _count_parts(value: Raw, depth: int = 2) -> int:
    """Return of how many objects a turn is made. Raises ValidationError for too many blocks."""
    content = fields_of(value).get("content", Raw(b"null"))
    if first_byte(content) != b"[" or not depth:
        return 1
    blocks = items_of(content, MAX_MESSAGES)
    if blocks is None:
        raise msgspec.ValidationError(f"content may have at most {MAX_MESSAGES} blocks")
    return 1 + sum(_count_parts(block, depth - 1) for block in blocks)


def _check(turn: Turn) -> None:
    """Raise ValidationError for a block that lacks a field, or has one of another type."""
    if isinstance(turn.content, str):
        return
    for block in turn.content:
        there = {name for name in _OWN if getattr(block, name) not in (None, NULL)}
        needed = _NEEDED[block.type]
        if missing := needed - there:
            raise msgspec.ValidationError(f"`{min(missing)}` is missing in a {block.type}")
        if more := there - needed - _MORE.get(block.type, set()):
            raise msgspec.ValidationError(f"`{min(more)}` is not a field of a {block.type}")
        if (block.type == "tool_use") != (turn.role == "assistant") and block.type != "text":
            raise msgspec.ValidationError(f"a {block.type} is not of role {turn.role}")
        if block.type == "tool_use":
            if first_byte(block.input) != b"{":
                raise msgspec.ValidationError("`input` must be an object")
            read_arguments(bytes(block.input).decode())
