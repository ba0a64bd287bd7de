"""The items of responses: what a request says was said before, and what a reply adds.

In a reply text and log-probabilities that are encoded already stand as Raw where these structs,
which tell who decodes them, have their types.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, field

from srm.errors import UNDECODABLE, InvalidRequest
from srm.server.dialects.chat.reply import TokenLogprob
from srm.server.schema.completion_response import NULL
from srm.server.schema.conversation import MAX_MESSAGES, MAX_PARTS, read_arguments
from srm.server.schema.json_parts import AnyJson, fields_of, first_byte, items_of
from srm.server.schema.validation import list_items, not_json, not_null, reading_item, show


class InputText(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """A text of a message, or of what a function returned."""

    text: str
    annotations: Annotated[Raw, Meta(extra_json_schema={"type": "array"})] = field(
        default_factory=lambda: NULL
    )
    """Passed over, as a reply's text has them; and so are the next."""
    logprobs: Annotated[Raw, Meta(extra_json_schema={"type": "array"})] = field(
        default_factory=lambda: NULL
    )


class EarlierText(InputText, frozen=True, forbid_unknown_fields=True, tag="output_text"):
    """The same, of a reply."""


class Refusal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """The text by which an assistant has refused to answer."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a call of a function, what it returned, or what a model thought; null is the same
    as absent."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Of a message."""
    content: str | list[InputText | EarlierText | Refusal] | None = None
    """Of a message: a text, or parts, each a line of its own."""
    call_id: str | None = None
    """Of a call, and of what it returned."""
    name: str | None = None
    """Of the function that is called."""
    arguments: str | None = None
    """Of a call, as JSON."""
    output: str | list[InputText | EarlierText] | None = None
    """What a call returned."""
    id: str | None = None
    """Passed over, as items of a reply have it; and so is the next."""
    status: str | None = None
    phase: str | None = None
    """Of a message, passed over."""
    summary: AnyJson = UNSET
    """Of what a model thought, passed over; and so are the next, and its content."""
    encrypted_content: AnyJson = UNSET


_NEEDED = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": set(),
}
"""Fields that an item of each type has, besides those that are passed over."""
_PASSED_OVER = {"message": {"phase"}, "reasoning": {"summary", "encrypted_content"}}
"""Fields that are, besides `type`, `id` and `status`."""
_MUST = (
    "be a message (role user, assistant, system or developer, and content of text), a "
    "function_call (call_id, name, arguments), a function_call_output (call_id, and output of "
    "text) or reasoning"
)
_decode_item = msgspec.json.Decoder(InputItem).decode
INPUT_FORMS = (
    Annotated[str, Meta(description=f"a string, or a list of 1 to {MAX_MESSAGES} items")],
    Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)],
)
"""Types that `input` may have on the wire."""


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    """Empty: nothing is searched here."""
    logprobs: list[TokenLogprob]
    """Those that `include` asks for."""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function, which the client makes."""

    id: str
    call_id: str
    """What the function returns names it."""
    name: str
    arguments: str
    """JSON; cut off if the status is incomplete."""
    status: Status


OutputItem = OutputMessage | OutputCall


def items_of_input(value: Raw) -> str | list[InputItem]:
    """Return the text or the items of a body. Raises InvalidRequest naming the item at fault."""
    what = f"a string, or a list of 1 to {MAX_MESSAGES} items"
    try:
        if first_byte(value) == b'"':
            return msgspec.json.decode(value, type=str)
        items = list_items(value, "input", MAX_MESSAGES, what)
    except UNDECODABLE as error:
        raise not_json(value, error) from None
    results, num_parts = [], 0
    for i, item in enumerate(items):
        with reading_item("input", i, item, _MUST):
            num_parts += _count_parts(item)
            if num_parts > MAX_PARTS:
                raise InvalidRequest(
                    f"input[{i}]: items must have at most {MAX_PARTS} parts together", "input"
                )
            results.append(_item(item))
    return results


def _count_parts(value: Raw) -> int:
    """Return of how many objects an item is made. Raises ValidationError for too many parts."""
    fields = fields_of(value)
    lists = [fields[name] for name in ("content", "output") if name in fields]
    counts = [items_of(parts, MAX_MESSAGES) for parts in lists if first_byte(parts) == b"["]
    if None in counts:
        raise msgspec.ValidationError(f"a text may have at most {MAX_MESSAGES} parts")
    return 1 + sum(len(parts or ()) for parts in counts)


def _item(value: Raw) -> InputItem:
    """Return an item. Raises ValidationError for anything else."""
    fields = fields_of(value)
    given = not_null(fields)
    kind = bytes(given.get("type", b'"message"'))
    if kind == b'"item_reference"':
        raise msgspec.ValidationError(
            "items cannot be referred to: send previous_response_id, or the item itself, as "
            "clients do that send store = false"
        )
    if kind[1:-1].decode() not in _NEEDED:
        raise msgspec.ValidationError(f"items of type {show(given['type'])} are not read")
    if kind == b'"reasoning"':
        given.pop("content", None)
    item = _decode_item(value if len(given) == len(fields) else msgspec.json.encode(given))
    needed = _NEEDED[item.type]
    if missing := needed - given.keys():
        raise msgspec.ValidationError(f"`{min(missing)}` is missing")
    passed_over = {"type", "id", "status"} | _PASSED_OVER.get(item.type, set())
    if more := given.keys() - needed - passed_over:
        raise msgspec.ValidationError(f"`{min(more)}` is not a field of a {item.type}")
    if item.arguments is not None:
        read_arguments(item.arguments)
    return item
