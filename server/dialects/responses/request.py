"""The body of POST /v1/responses, checked field by field.

A response is the next message of a chat: `chat_of_response` makes that of instructions, items and
the messages of the response that it goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import ChatRequest, chat_of
from srm.server.dialects.responses.items import InputItem, InputText, Refusal, items_of_input
from srm.server.schema.completion_response import NULL
from srm.server.schema.conversation import Message, ReasoningEffort, messages_of
from srm.server.schema.json_parts import to_json
from srm.server.schema.sampling_fields import (
    NEUTRAL,
    Alternatives,
    Metadata,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Stops,
    StreamOptions,
    Temperature,
    TopK,
)
from srm.server.schema.validation import (
    Fields,
    checked,
    given_fields,
    naming,
    refused,
    require,
    show,
)

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What may be asked for; but for the first, it is of items that no reply here has."""


Schema = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})] | UnsetType


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the text: free, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """Of the schema."""
    schema: Schema = UNSET
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat = TextFormat("text")
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that may be called."""

    name: str
    type: Literal["function"]
    parameters: Schema = UNSET
    """JSON Schema of its arguments."""
    description: str | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of one function."""

    name: str
    type: Literal["function"]


class ResponseRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/responses, checked."""

    successors: ClassVar = {
        **dict.fromkeys(ChatRequest.__struct_encode_fields__, "POST /v1/chat/completions has it"),
        "conversation": "previous_response_id goes on from a response",
        "prompt": "prompts are not stored: send instructions and input",
        "truncation": "POST /v1/chat/completions has truncate_prompt_tokens",
        "max_tool_calls": "no tool is called here",
        "messages": "it is input here",
        "max_tokens": "it is max_output_tokens here",
        "max_completion_tokens": "it is max_output_tokens here",
        "response_format": "it is text.format here",
        "logprobs": f'include = ["{LOGPROBS}"] asks for them here',
        **dict.fromkeys(
            ("n", "best_of", "until", "return", "count_by", "stream_whole"),
            "a response is one answer; POST /v1/chat/completions makes many",
        ),
    }
    input: str | list[InputItem]
    """The text or the items to answer."""
    instructions: str | None = None
    """A system message before them."""
    model: str | None = None
    """Name of the served model; others are refused."""
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of the answer."""
    temperature: Temperature = 1.0
    """Divides the logits; below 0.0001 is greedy."""
    top_p: Probability = 1.0
    """Keep the fewest likeliest tokens of this total probability, and ties."""
    stream: bool = False
    """Send events as the answer is made."""
    stream_options: (
        Annotated[
            StreamOptions,
            Meta(description="an object with include_usage and include_obfuscation, true or false"),
        ]
        | None
    ) = None
    """Accepted and not used: usage is in the last event, and events are not padded."""
    store: bool | None = None
    """Store the response for a day, to be asked for and gone on from."""
    background: bool = False
    """Answer at once, and make the response meanwhile; only with `store`."""
    previous_response_id: (
        Annotated[str, Meta(description="the id of a response that was stored")] | None
    ) = None
    """Go on from this response: what was said up to it comes before `input`."""
    reasoning: (
        Annotated[
            ReasoningOptions,
            Meta(
                description="an object with effort: none, minimal, low, medium, high, xhigh or "
                "max; and summary: auto, concise or detailed"
            ),
        ]
        | None
    ) = None
    """A template may read `effort`, as reasoning_effort; there are no summaries."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""
    text: (
        Annotated[
            TextOptions,
            Meta(
                description="an object with format, whose type is text, json_object or "
                'json_schema, the last with name and schema, and verbosity: "medium"'
            ),
        ]
        | None
    ) = None
    """The form of the text."""
    tools: Annotated[
        list[FunctionTool],
        Meta(
            description='a list of functions: objects with type "function", name, parameters and '
            "at most description and strict"
        ),
    ] = []
    """Functions that may be called; none is called here."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice,
        Meta(description='none, auto, required, or {"type": "function", "name": …}'),
    ] = "auto"
    """Whether a function is called, and which."""
    parallel_tool_calls: bool | None = None
    """With `required`: whether there may be several calls."""
    include: Annotated[
        list[Included], Meta(max_length=8, description="a list of OpenAI's names of what to add")
    ] = []
    """`message.output_text.logprobs` adds log-probabilities; the others add nothing."""
    top_logprobs: Alternatives | None = None
    """Alternatives of each token; only with these."""
    top_k: TopK = 0
    """Keep this many of the likeliest tokens, and ties."""
    min_p: Probability = 0.0
    """Drop tokens below this fraction of the largest probability."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each sampled token."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit each time it is sampled."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive logits of prompt and sampled tokens, multiplies negative ones."""
    seed: Seed | None = None
    """Makes the answer repeatable."""
    stop: Stops = []
    """The text ends before the first of these."""
    metadata: Metadata = {}
    """Returned and not used."""
    user: str | None = None
    """Returned and not used."""
    safety_identifier: str | None = None
    """Returned and not used."""
    prompt_cache_key: str | None = None
    """Returned and not used; all prompts are cached."""

    def check(self) -> None:
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise refused(ResponseRequest, "stream_options", self.stream_options)
        if self.background and (self.stream or not self.store):
            raise InvalidRequest(
                "background = true is allowed only with store = true and without stream: GET asks "
                "for the response",
                "background",
            )
        if self.top_logprobs and LOGPROBS not in self.include:
            raise InvalidRequest(
                f'top_logprobs = {self.top_logprobs} is allowed only with include = ["{LOGPROBS}"]',
                "top_logprobs",
            )


RESPONSE_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "add_special_tokens": (False,)}
"""NEUTRAL, of responses."""
_OF_CHAT = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
"""Fields of a response by the fields of the chat that they become."""
_SHOWN_OF_CHAT = {
    r"response_format(\.json_schema)?": "text.format",
    "max_completion_tokens": "max_output_tokens",
    '"function": {"name": …}': '"name": …',
    r"\.function\.": ".",
}
"""The same in messages of errors."""


def parse_response(body: bytes) -> tuple[ResponseRequest, dict[str, Raw]]:
    """Check the body of POST /v1/responses; return it, and its fields as they came. Raises
    InvalidRequest naming field and value."""
    given = given_fields(body, ResponseRequest, RESPONSE_NEUTRAL)
    require(given, "input", "a text, or a list of items")
    items = items_of_input(given["input"])
    return checked(ResponseRequest, given, {"input": items}, RESPONSE_NEUTRAL), given


def chat_of_response(
    request: ResponseRequest, given: dict[str, Raw], before: Sequence[dict[str, Any]] = ()
) -> ChatRequest:
    """Return the chat that a body stands for, which goes on from the messages `before`. Raises
    InvalidRequest naming field and value."""
    with naming_as_here():
        try:
            return _chat(request, given, before)
        except InvalidRequest as error:
            if error.message.startswith("response_format must be "):
                raise refused(ResponseRequest, "text", given["text"]) from None
            raise


naming_as_here = partial(naming, _OF_CHAT, _SHOWN_OF_CHAT)
"""Has an error about the chat's field name the response's."""


def _chat(
    request: ResponseRequest, given: dict[str, Raw], before: Sequence[dict[str, Any]]
) -> ChatRequest:
    """Return the chat of a response. Raises InvalidRequest naming its fields."""
    same = given.keys() & ({*ChatRequest.__struct_fields__} & {*request.__struct_fields__})
    same -= {"tools", "tool_choice", "top_logprobs", "stream_options"}
    fields = {name: given[name] for name in same}
    messages = messages_of({"messages": to_json(chat_messages(request, before))})
    if request.instructions:
        messages.insert(0, Message("system", request.instructions))
    converted: dict[str, Any] = {"messages": messages}
    if request.stream:
        converted["stream_options"] = StreamOptions(include_usage=True)
    if request.reasoning is not None:
        converted["reasoning_effort"] = request.reasoning.effort
    if request.max_output_tokens is not None:
        converted["max_completion_tokens"] = request.max_output_tokens
    if LOGPROBS in request.include:
        converted |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    form = (request.text or TextOptions()).format
    if form != TextFormat("text"):
        fields["response_format"] = to_json(_response_format(form))
    if request.tools:
        fields["tools"] = to_json([_tool(tool) for tool in request.tools])
    if "tool_choice" in given:
        chosen: Any = request.tool_choice
        if isinstance(chosen, FunctionChoice):
            chosen = {"type": "function", "function": {"name": chosen.name}}
        fields["tool_choice"] = to_json(chosen)
    return chat_of(fields, converted, ChatRequest)


def _given(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of an object that are neither absent nor null."""
    fields = msgspec.structs.asdict(value).items()
    return {name: own for name, own in fields if own not in (None, UNSET, NULL)}


def _response_format(form: TextFormat) -> dict[str, Any]:
    fields = _given(form)
    kind = fields.pop("type")
    is_schema = fields or kind == "json_schema"
    return {"type": kind, "json_schema": fields} if is_schema else {"type": kind}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = _given(tool)
    return {"type": fields.pop("type"), "function": fields}


def chat_messages(
    request: ResponseRequest, before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages `before` and those of the items; calls are part of the assistant's
    message before them."""
    if isinstance(request.input, str):
        return [*before, {"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    call_ids = {call["id"] for message in before for call in message.get("tool_calls", ())}
    for i, item in enumerate(request.input):
        if item.type == "message":
            messages.append({"role": item.role, "content": _content(item.content)})
        elif item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            call_ids.add(item.call_id)
        elif item.type == "function_call_output" and item.call_id not in call_ids:
            raise InvalidRequest(
                f"input[{i}]: call_id = {show(item.call_id)} is that of no function_call before it",
                "input",
            )
        elif item.type == "function_call_output":
            content = _content(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    if not messages:
        raise InvalidRequest(
            f"input must have a message or a call; got {show(request.input)}", "input"
        )
    return [*before, *messages]


def _content(
    content: str | Sequence[InputText | Refusal] | None,
) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
