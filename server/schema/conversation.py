"""The messages of a chat, checked, and as a chat template takes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from srm.errors import UNDECODABLE, InvalidRequest, RequestError, cut, in_words
from srm.server.schema.json_parts import (
    MAX_VALUE_BYTES,
    fields_of,
    first_byte,
    has_text,
    items_of,
    token_ids,
)
from srm.server.schema.tools import CALL_HEAD, Tool, required_calls
from srm.server.schema.validation import list_items, not_null, reading_item, show

MAX_MESSAGES = 4096
"""Most messages of one chat."""
MAX_CHATS = 4096
"""Most chats of one request."""
MAX_PARTS = 65_536
"""Most messages, parts of their contents and tool calls of one request."""

ROLES = ("developer", "system", "user", "assistant", "tool")
"""Roles that any template may be given; its own are those that it names."""
Role = Annotated[str, Meta(min_length=1, max_length=64, extra_json_schema={"enum": [*ROLES]})]
"""A template's own are not in the OpenAPI document: another template has others."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_NAME = re.compile(r"""["'](\w+)["']""")
_OWN_VARIABLES = {"messages", "add_generation_prompt", "continue_final_message"}
"""Template variables that requests set in fields of their own."""
_LABELS = {"cache_control", "id", "parsed", "parsed_arguments", "type"}
"""Keys beside a text that may have any value: no template shows it. What openai's SDK parsed says
what content and arguments say."""
_ASKING = {"partial", "prefix"}
"""Keys that ask other servers to continue a message."""


class _TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON of an object."""

    def __post_init__(self) -> None:
        try:
            arguments = read_arguments(self.arguments)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None  # to which msgspec adds the place
        msgspec.structs.force_setattr(self, "arguments", arguments)


class _ToolCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier turn: no tool is called here."""

    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


def read_arguments(text: str) -> str:
    """Return the arguments of an earlier call, which are JSON of an object: none are given by a
    text that is blank or null. Raises msgspec.ValidationError for any other text."""
    if text.strip() in ("", "null"):
        return "{}"
    if len(text) <= MAX_VALUE_BYTES:  # longer ones are refused with all others of the request
        try:
            msgspec.json.decode(text, type=dict[str, Any])
        except UNDECODABLE as error:
            is_deep = isinstance(error, RecursionError)
            fault = "it nests too deep" if is_deep else in_words(error)
            raise msgspec.ValidationError(
                f"arguments must be JSON of an object: {fault}; got {show(text)}"
            ) from None
    return text


_IDS = Meta(
    description="a list of token ids, not empty",
    extra_json_schema={
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "minItems": 1,
    },
)
IdsJson = Annotated[Raw, _IDS]
"""A list of token ids as it came: most of those of a conversation are not read."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn; null is the same as absent.

    Clients send a reply's message back with keys of their own: those without text are let pass.
    """

    role: Role
    content: str | list[_TextPart] = ""
    """Text, or parts of text, each a line of its own. Only an assistant's may be absent."""
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str = ""
    """What an assistant thought, for a template that reads it."""
    reasoning: str = ""
    """The same by vLLM's newer name."""
    prompt_token_ids: IdsJson = msgspec.field(default_factory=Raw)
    """With the next: the tokens that an assistant's message was sampled after."""
    generation_token_ids: IdsJson = msgspec.field(default_factory=Raw)
    """The tokens that were sampled."""

    @property
    def token_ids(self) -> bytes:
        """All tokens up to the end of this message, int32 little-endian; none if it has none.

        Raises msgspec.ValidationError for what is no list of ids.
        """
        whole = b""
        for name in _ID_LISTS:
            if raw := getattr(self, name):
                if not (ids := token_ids(raw)):
                    raise msgspec.ValidationError(f"`{name}` may not be empty")
                whole += ids
        return whole

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class ExactPrompt(msgspec.Struct, frozen=True):
    """A chat's prompt that begins with given token ids; the rest is still to be tokenized."""

    token_ids: bytes
    """int32 little-endian, at least one."""
    rest: str
    """What the template writes behind the message whose ids these are; behind its content if
    `has_calls`."""
    has_calls: bool
    """Whether `rest` begins in the calls of that message."""
    source: str
    """Where they were given, for errors."""

    @property
    def field(self) -> str:
        """The field that has them."""
        return self.source.partition("[")[0]


_ID_LISTS = ("prompt_token_ids", "generation_token_ids")
_ABSENT = Raw(b"null")
_decode = msgspec.json.Decoder(Message).decode
_SHOWN_NAME = 64
"""Most characters of a key in an error."""
_MUST = (
    "be an object with role (developer, system, user, assistant, tool or another of the template), "
    "content (a string or a list of text parts) and at most name, tool_calls, tool_call_id, "
    "reasoning_content, reasoning, prompt_token_ids and generation_token_ids"
)
_CALLING = "To call a function, answer with {} alone. Functions:"
_INNER: dict[str, type[msgspec.Struct]] = {
    "content": _TextPart,
    "tool_calls": _ToolCall,
    "function": _Function,
}
"""Structs of the objects in these fields."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A chat, and the options of its template."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    required_prefix_token_ids: bytes | None = None
    """The tokens up to the end of the last message of the assistant, int32 little-endian."""
    tools: list[Tool] = []
    """What may be called, if a template shows it."""
    tells_tools: bool = False
    """Whether the model is to know them where the template does not show them."""

    @classmethod
    def from_request(cls, request: Any) -> Conversation:
        """Return the chat of a request, which has these fields too, and says what may be called.
        Raises InvalidRequest if it cannot be."""
        own = {"tools", "tells_tools"}
        given = {name: getattr(request, name) for name in {*cls.__struct_fields__} - own}
        effort = request.reasoning_effort
        hints = {} if effort is None else {"reasoning_effort": effort}
        given["chat_template_kwargs"] = {**hints, **(request.chat_template_kwargs or {})}
        calls = required_calls(request.tools, request.tool_choice, False)
        if calls is not None:
            given |= {"tools": request.tools, "tells_tools": calls.may_be_text}
        return cls(**given)

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the template's beginning of an answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt = true begins another message; with continue_final_message "
                "= true leave it out or send false",
                "add_generation_prompt",
            )
        if self.continue_final_message:
            last = self.messages[-1]
            fault = "has tool calls, behind which no text goes on" if last.tool_calls else ""
            if fault := fault or "has no content to continue" * (not last.text):
                raise InvalidRequest(
                    f"continue_final_message = true: the last message {fault}",
                    "continue_final_message",
                )
        own = _OWN_VARIABLES | {"tools"} if self.tools else _OWN_VARIABLES
        for name in self.chat_template_kwargs:
            if name in own:
                raise InvalidRequest(
                    f"chat_template_kwargs may not have {name!r}, which is a field of its own",
                    "chat_template_kwargs",
                )
        self._check_results()
        self.exact()

    def exact(self) -> tuple[int, ExactPrompt] | None:
        """Return the last message whose token ids are given, and a prompt of them alone; None if
        there is none. Raises InvalidRequest for ids that belong to no message."""
        required, name = self.required_prefix_token_ids, "required_prefix_token_ids"
        for i in reversed(range(len(self.messages))):
            message = self.messages[i]
            calls = bool(message.tool_calls)
            if required is not None and message.role == "assistant":
                if message.token_ids and message.token_ids != required:
                    raise InvalidRequest(
                        f"{name} and the token ids of messages[{i}] differ: send one of them", name
                    )
                return i, ExactPrompt(required, "", calls, name)
            if required is None and message.token_ids:
                return i, ExactPrompt(message.token_ids, "", calls, f"messages[{i}]")
        if required is None:
            return None
        raise InvalidRequest(
            f"{name} end with a message of the assistant, and messages has none: send its text too",
            name,
        )

    def marked(self, i: int, mark: str) -> Conversation:
        """The same chat with a mark where the content of a message ends or, if it has tool calls,
        in place of the last one's arguments."""
        message = self.messages[i]
        if calls := message.tool_calls:
            function = _Function(calls[-1].function.name, f'{{"{mark}":""}}')
            last = msgspec.structs.replace(calls[-1], function=function)
            changed = msgspec.structs.replace(message, tool_calls=[*calls[:-1], last])
        else:
            changed = msgspec.structs.replace(message, content=message.text + mark)
        messages = [*self.messages[:i], changed, *self.messages[i + 1 :]]
        return msgspec.structs.replace(self, messages=messages)

    def _check_results(self) -> None:
        ids = set()
        for i, message in enumerate(self.messages):
            for call in message.tool_calls or ():
                ids.add(call.id)
            if message.tool_call_id is not None and message.tool_call_id not in ids:
                raise InvalidRequest(
                    f"messages[{i}]: tool_call_id = {show(message.tool_call_id)} is the id of no "
                    "tool call in the messages before it",
                    "messages",
                )

    @property
    def has_calls(self) -> bool:
        """Whether its messages have calls of tools or what these returned."""
        return any(message.tool_calls or message.role == "tool" for message in self.messages)

    def as_text(self) -> Conversation:
        """The same chat for a template that knows no calls: an assistant's are lines of JSON behind
        its content, and what tools returned is a message of the user."""
        names: dict[str, str] = {}
        messages: list[Message] = []
        are_results = False
        for message in self.messages:
            lines = [text] if (text := message.text) else []
            role = message.role
            for call in message.tool_calls or ():
                name, arguments = call.function.name, call.function.arguments
                names[call.id or ""] = name
                lines.append(f"{CALL_HEAD.format(name)}{arguments}}}")
            if role == "tool":
                id = message.tool_call_id
                name = (names[id] if id else message.name) or "the tool"
                lines, role = [f"Result of {name}: {text}"], "user"
                if are_results:  # one message, for many a template wants the roles in turns
                    lines = [messages.pop().text, *lines]
            are_results = message.role == "tool"
            messages.append(
                msgspec.structs.replace(
                    message,
                    role=role,
                    content="\n".join(lines),
                    name=None if are_results else message.name,
                    tool_calls=None,
                    tool_call_id=None,
                )
            )
        return msgspec.structs.replace(self, messages=messages)

    def with_tools_as_text(self) -> Conversation:
        """The same chat for a template that shows no tools: a message of the system has them."""
        lines = [
            _CALLING.format(CALL_HEAD.format("NAME") + "ARGUMENTS}"),
            *(msgspec.json.encode(tool.function).decode() for tool in self.tools),
        ]
        messages = list(self.messages)
        if messages[0].role in ("system", "developer"):
            lines.insert(0, messages.pop(0).text)
        message = Message("system", "\n".join(lines))
        return msgspec.structs.replace(self, messages=[message, *messages])

    def for_template(self, names: Collection[str]) -> list[dict[str, Any]]:
        """The messages as a template that has these `names` expects them: content is one text,
        arguments are objects. Raises InvalidRequest for a role that is none of ROLES or `names`.

        "developer" is OpenAI's newer word for "system", which older templates do not know.
        """
        for i, message in enumerate(self.messages):
            if message.role not in ROLES and message.role not in names:
                raise InvalidRequest(
                    f"messages[{i}]: role must be {', '.join(ROLES)}, or one that the chat "
                    f"template names; got {cut(message.role, _SHOWN_NAME)!r}",
                    "messages",
                )
        return [_for_template(message, "developer" in names) for message in self.messages]


def names_in(template: str) -> set[str]:
    """Return the words between quotation marks: what a template may compare a role with."""
    return set(_NAME.findall(template))


def messages_of(given: dict[str, Raw]) -> list[Message]:
    """The field `messages` of a body. Raises InvalidRequest naming the message at fault."""
    return _messages(given.get("messages", _ABSENT), _Sizes())


def chats_of(given: dict[str, Raw]) -> list[list[Message]]:
    """The field `messages` of a body with several chats. Raises as `messages_of`."""
    sizes, chats = _Sizes(), []
    value, what = given.get("messages", _ABSENT), f"a list of 1 to {MAX_CHATS} lists of messages"
    for i, item in enumerate(list_items(value, "messages", MAX_CHATS, what)):
        with naming_chat(i):
            chats.append(_messages(item, sizes))
    return chats


@contextmanager
def naming_chat(i: int) -> Iterator[None]:
    """Have an error about one of several chats say which."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            rest = error.message.removeprefix("messages")
            error.message = f"messages[{i}]{': ' * (rest == error.message)}{rest}"
        raise


class _Sizes:
    """How much all messages of a request have together."""

    parts = 0
    argument_bytes = 0


def _messages(value: Raw, sizes: _Sizes) -> list[Message]:
    messages, what = [], f"a list of 1 to {MAX_MESSAGES} messages"
    for i, item in enumerate(list_items(value, "messages", MAX_MESSAGES, what)):
        message, num_parts = _message(item, i)
        messages.append(message)
        sizes.parts += num_parts
        arguments = [call.function.arguments for call in message.tool_calls or ()]
        sizes.argument_bytes += sum(map(len, arguments))
        if sizes.parts > MAX_PARTS:
            raise InvalidRequest(
                f"messages[{i}]: messages must have at most {MAX_PARTS} parts and tool calls "
                "together",
                "messages",
            )
        if sizes.argument_bytes > MAX_VALUE_BYTES:
            raise InvalidRequest(
                f"messages[{i}]: the arguments of tool calls must have at most {MAX_VALUE_BYTES} "
                "characters together",
                "messages",
            )
    return messages


def _message(value: Raw, i: int) -> tuple[Message, int]:
    """Return the message, and the number of objects that it is made of."""
    with reading_item("messages", i, value, _MUST):
        fields = fields_of(value)
        given = not_null(fields)
        parts = _check_keys(given, Message)
        # Decoded as it came where nothing is null: then the error says where it is wrong.
        message = _decode(value if len(given) == len(fields) else msgspec.json.encode(given))
        if "content" not in given and message.role != "assistant":
            raise msgspec.ValidationError("only an assistant's content may be left out")
        _check_ids(message, given)
        return message, parts


def _check_ids(message: Message, given: dict[str, Raw]) -> None:
    """Raise ValidationError for token ids that are no whole message of the assistant."""
    missing = [name for name in _ID_LISTS if not getattr(message, name)]
    if len(missing) == len(_ID_LISTS):
        return
    if missing:
        raise msgspec.ValidationError(f"`{missing[0]}` is missing: both lists are sent, or none")
    if message.role != "assistant":
        raise msgspec.ValidationError("only an assistant's message may have token ids")
    if "content" not in given and not message.tool_calls:
        raise msgspec.ValidationError("the text that its token ids make is missing: `content`")
    try:
        _ = message.token_ids
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"token ids: {error}") from None


def _check_keys(fields: dict[str, Raw], kind: type[msgspec.Struct]) -> int:
    """Return the number of objects that a message, or a part of one, is made of.

    Raises ValidationError for text under an unknown key of it or of its parts.
    """
    if kind is _TextPart and bytes(form := fields.get("type", Raw(b'"text"'))) != b'"text"':
        raise msgspec.ValidationError(f"only text is read; got a part of type {show(form)}")
    for name in fields.keys() - {*kind.__struct_fields__, *_LABELS}:
        value = fields[name]
        shown = cut(name, _SHOWN_NAME)
        if len(value) > MAX_VALUE_BYTES:
            raise msgspec.ValidationError(
                f"`{shown}` is an unknown field, which may have at most {MAX_VALUE_BYTES} bytes"
            )
        if has_text(value) or (name in _ASKING and bytes(value) == b"true"):
            raise msgspec.ValidationError(f"`{shown}` is an unknown field, which may not have text")
    count = 1
    for name in fields.keys() & _INNER.keys() & {*kind.__struct_fields__}:
        parts = [fields[name]]
        if first_byte(parts[0]) == b"[":
            items = items_of(parts[0], MAX_MESSAGES)
            if items is None:
                raise msgspec.ValidationError(f"`{name}` may have at most {MAX_MESSAGES} parts")
            parts = items
        for part in parts:
            if first_byte(part) == b"{":
                count += _check_keys(fields_of(part), _INNER[name])
    return count


def _for_template(message: Message, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    template: dict[str, Any] = {
        **msgspec.to_builtins(msgspec.structs.replace(message, **dict.fromkeys(_ID_LISTS))),
        "role": role,
        "content": message.text,
    }
    for name in _ID_LISTS:  # which no template writes
        del template[name]
    for call in template.get("tool_calls") or ():
        call["function"]["arguments"] = msgspec.json.decode(call["function"]["arguments"])
    return template
