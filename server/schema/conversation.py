"""The messages of a chat, checked, and as a chat template takes them. Knows no template."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import UNDECODABLE, InvalidRequest
from server.schema.validation import show

MAX_MESSAGES = 4096
"""Most messages of one chat."""

Role = Literal["developer", "system", "user", "assistant", "tool"]
_OWN_VARIABLES = {"messages", "add_generation_prompt", "continue_final_message"}
"""Template variables that requests set in fields of their own."""
_LABELS = {"cache_control", "id", "type"}
"""Keys beside a text that may have any value: no template shows it."""
_ASKING = {"partial", "prefix"}
"""Keys that ask other servers to continue a message."""


class _TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier turn: no tool is called here."""

    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


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

    @classmethod
    def of(cls, request: Any) -> Conversation:
        """Return the chat of a request, which has these fields too."""
        given = {name: getattr(request, name) for name in cls.__struct_fields__}
        return cls(**{**given, "chat_template_kwargs": request.chat_template_kwargs or {}})

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
        if self.continue_final_message and not self.messages[-1].content:
            raise InvalidRequest(
                "continue_final_message = true: the last message has no content to continue",
                "continue_final_message",
            )
        for name in self.chat_template_kwargs:
            if name in _OWN_VARIABLES:
                raise InvalidRequest(
                    f"chat_template_kwargs may not have {name!r}, which is a field of its own",
                    "chat_template_kwargs",
                )

    def for_template(self, knows_developer: bool) -> list[dict[str, Any]]:
        """The messages as templates expect them: content is one text, arguments are objects.

        "developer" is OpenAI's newer word for "system", which older templates do not know.
        """
        return [_for_template(message, knows_developer) for message in self.messages]


def messages_of(given: dict[str, Any]) -> list[Message]:
    """The field `messages` of a body. Raises InvalidRequest naming the message at fault."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must be a list of 1 to {MAX_MESSAGES} messages; got {show(messages)}",
            "messages",
        )
    return [_message(value, i) for i, value in enumerate(messages)]


def _message(value: Any, i: int) -> Message:
    try:
        if isinstance(value, dict):
            value = {name: one for name, one in value.items() if one is not None}
        _check_keys(value, Message)
        message = msgspec.convert(value, Message)
        if "content" not in value and message.role != "assistant":
            raise msgspec.ValidationError("only an assistant's content may be left out")
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"messages[{i}] must be an object with role (developer, system, user, assistant or "
            "tool), content (a string or a list of text parts) and at most name, tool_calls and "
            f"tool_call_id; got {show(value)} ({error})",
            "messages",
        ) from None
    return message


def _check_keys(value: Any, kind: type[msgspec.Struct]) -> None:
    """Raise ValidationError for text under an unknown key of a message or of its parts."""
    if not isinstance(value, dict):
        return
    for name in value.keys() - {*kind.__struct_fields__, *_LABELS}:
        if _has_text(value[name]) or (name in _ASKING and value[name] is True):
            raise msgspec.ValidationError(f"`{name}` is not a field of it and may have no text")
    for name in value.keys() & _INNER.keys() & {*kind.__struct_fields__}:
        parts = value[name] if isinstance(value[name], list) else [value[name]]
        for part in parts:
            _check_keys(part, _INNER[name])


def _has_text(value: Any) -> bool:
    """Whether a value from JSON has a string that is not empty, however deep."""
    values = [value]
    while values:
        one = values.pop()
        if isinstance(one, str) and one:
            return True
        if isinstance(one, list | dict):
            values += one.values() if isinstance(one, dict) else one
    return False


def _for_template(message: Message, knows_developer: bool) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" and not knows_developer else message.role
    found: dict[str, Any] = {**msgspec.to_builtins(message), "role": role, "content": content}
    for call in found.get("tool_calls") or ():
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return found


def _arguments(text: str) -> Any:
    """Decode an earlier call's arguments; return the text if it is no JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE:
        return text
