"""Responses as OpenAI's SDK reads them: the reply, and every event of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from srm.errors import InvalidRequest
from srm.server.dialects.responses.endpoint import Responses
from srm.server.dialects.responses.format import ResponsesFormat
from srm.server.errors import INTERNAL
from srm.server.generation.engine_request import RequestOwner
from srm.server.schema.conversation import MAX_MESSAGES, Message
from srm.server.schema.tools import CALL_HEAD
from srm.server.text.text import Text
from tests.kit.bodies.refusals import parse_response
from tests.unit.server.reply.test_stream_writer import (
    ABORT,
    CAT,
    CUT,
    LENGTH,
    MAT,
    REST,
    SPECIAL,
    STOP,
    THE,
    Served,
    turns,
)

EVENT: Any = TypeAdapter(ResponseStreamEvent)
SCORES: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TEXT = " the catéthe mat"
"""What TOKENS read as; each of them is an event, but for the two bytes of é."""
TOKENS = (THE, CAT, CUT, REST, THE, MAT)


def form_of(is_stream: bool, /, **fields: Any) -> Any:
    """The format of a request, and the fields of the completion that it becomes."""
    body = {"input": "x", "stream": is_stream, **fields}
    asked, chat = parse_response(json.dumps(body).encode())
    completion = {"prompt": [5], "max_tokens": 99, "stream": is_stream}
    if chat.logprobs:
        completion["logprobs"] = chat.top_logprobs
    if chat.stops:
        completion["stop"] = chat.stops
    if is_stream:
        completion["stream_options"] = {"include_usage": True}
    return partial(ResponsesFormat, asked=asked, calls=chat.calls), completion


async def stream(
    text: Text, /, reason: int = STOP, tokens: Sequence[int] = TOKENS, **fields: Any
) -> tuple[list[Any], int]:
    """The events of a stream as the SDK has them, and how many its task did not send."""
    dialect, completion = form_of(True, **fields)
    reply = await Served(text).stream(tokens, reason, dialect=dialect, **completion)
    return events_of(b"".join(reply.sent)), reply.num_written


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, whose lines `event:` must say the types of their JSON."""
    assert body.endswith(b"\n\n") and b"[DONE]" not in body
    events = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events


@pytest.mark.parametrize("fields", [{}, SCORES])
async def test_a_stream_says_all_that_the_sdk_reads(text: Text, fields: dict[str, Any]) -> None:
    events, num_written = await stream(text, **fields)
    assert num_written
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*begun, *["output_text.delta"] * len(deltas), *ended]
    done, part, item, last = events[-4:]
    whole = "".join(event.delta for event in deltas)
    assert done.text == part.part.text == item.item.content[0].text == whole
    assert last.response.output == [item.item]
    assert last.response.output_text == whole
    assert last.response.status == item.item.status == "completed"
    usage = last.response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (1, 6, 7)
    assert {event.item_id for event in deltas} == {item.item.id, done.item_id, part.item_id}
    scores = [score for event in deltas for score in event.logprobs]
    assert [score.logprob for score in scores] == [s.logprob for s in part.part.logprobs]
    assert len(scores) == (6 if fields else 0)
    assert all(len(score.top_logprobs) in (1, 2) for score in scores)


async def test_a_stream_that_is_cut_says_by_what(text: Text) -> None:
    events, _ = await stream(text, reason=LENGTH, max_output_tokens=6)
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.status == response.output[0].status == "incomplete"
    assert response.max_output_tokens == 6


async def render_whole(text: Text, reason: int = STOP, /, **fields: Any) -> Any:
    dialect, completion = form_of(False, **fields)
    return await Served(text).render_whole(dialect, TOKENS, reason, **completion)


@pytest.mark.parametrize("fields", [{}, SCORES])
async def test_a_stream_ends_with_the_whole_response(text: Text, fields: dict[str, Any]) -> None:
    reply = await render_whole(text, **fields)
    response = Response.model_validate(reply)
    events, _ = await stream(text, **fields)
    assert response.output_text == events[-1].response.output_text
    assert response.output == events[-1].response.output


async def test_a_response_repeats_its_request(text: Text) -> None:
    asked = {
        **{"instructions": "Count.", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.75},
        **{"metadata": {"run": "1"}, "user": "bob", "safety_identifier": "b"},
        **{"prompt_cache_key": "k", "parallel_tool_calls": False, "tool_choice": "none"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    reply = await render_whole(text, **asked)
    assert asked.items() <= reply.items()
    assert reply["store"] is False and reply["previous_response_id"] is None


async def test_a_command_stores_no_responses(text: Text) -> None:
    endpoint = Responses(None, text, None)  # type: ignore[arg-type]  # which are not asked
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
        body = json.dumps({"input": "x", **fields}).encode()
        with pytest.raises(InvalidRequest, match="is for `srm serve`") as refused:
            await endpoint.begin(body, "resp_2", RequestOwner())
        assert refused.value.param == next(iter(fields))


async def test_an_error_in_a_stream_is_the_failed_response(text: Text) -> None:
    served = Served(text)
    dialect, completion = form_of(True)
    reply, task = await served.ask(dialect=dialect, **completion)
    for token in (THE, CAT, MAT):
        served.say({(0, 0): token})
        await turns()
    body = b"".join(reply.sent) + served.outlets[0].renderer.form.frame_error(INTERNAL)
    failed = events_of(body)[-1]
    assert failed.type == "response.failed"
    assert failed.response.error.message == "internal server error"
    assert failed.response.output[0].status == "incomplete"
    assert failed.response.output_text == "".join(
        event.delta for event in events_of(body) if event.type == "response.output_text.delta"
    )
    task.cancel()


ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
FIND = {**ADD, "name": "find"}
ONE_CALL = '{"a":"}"}'
ARGUMENTS = ['{"q":"the {cat"}', '{"a":1}']
SEVERAL_CALLS = ", ".join(
    CALL_HEAD.format(name) + arguments + "}"
    for name, arguments in zip(["find", "add"], ARGUMENTS, strict=True)
)


async def called(text: Text, content: str, is_cut: bool = False, **fields: Any) -> list[Any]:
    """The events of a response whose text is this, a character at a time."""
    tokens = [int.from_bytes(text.encode([character])[0][-4:], "little") for character in content]
    reason, fields = LENGTH if is_cut else STOP, {"tool_choice": "required", **fields}
    events, _ = await stream(text, reason, tokens, **fields)
    return events


@pytest.mark.parametrize("fields", [{}, {"tools": [ADD], "tool_choice": "required"}])
async def test_what_an_operator_ends_is_incomplete(text: Text, fields: dict[str, Any]) -> None:
    events, _ = await stream(text, ABORT, **fields)
    assert events[-1].type == "response.incomplete"
    response: Any = Response.model_validate(await render_whole(text, ABORT, **fields))
    for made in (events[-1].response, response):
        assert made.status == made.output[0].status == "incomplete"
        assert made.incomplete_details is None  # none of OpenAI's reasons is it


async def test_the_one_function_is_called_with_the_text(text: Text) -> None:
    events = await called(text, ONE_CALL + "x", tools=[ADD])
    (call,) = events[-1].response.output
    assert (call.name, call.arguments, call.status) == ("add", ONE_CALL, "completed")
    added, *deltas, done, item, last = events[2:]
    assert added.item.arguments == "" and added.item.status == "in_progress"
    assert "".join(event.delta for event in deltas) == done.arguments == ONE_CALL
    assert item.item == call and last.response.output_text == ""


async def test_each_of_several_calls_is_an_item(text: Text) -> None:
    content = f"[{SEVERAL_CALLS}]x"
    events = await called(text, content, tools=[ADD, FIND], parallel_tool_calls=True)
    output = events[-1].response.output
    assert [call.name for call in output] == ["find", "add"]
    assert [call.arguments for call in output] == ARGUMENTS
    assert len({call.call_id for call in output}) == 2
    for index, call in enumerate(output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[-1].item == call
        assert "".join(event.delta for event in own[1:-2]) == own[-2].arguments == call.arguments


async def test_by_auto_a_response_is_a_call_or_a_message(text: Text) -> None:
    content = CALL_HEAD.format("add") + ONE_CALL + "}"
    events = await called(text, content + "x", tools=[ADD], tool_choice="auto")
    (call,) = events[-1].response.output
    assert (call.name, call.arguments, call.status) == ("add", ONE_CALL, "completed")
    events = await called(text, "no {call}x", tools=[ADD], tool_choice="auto")
    (message,) = events[-1].response.output
    assert message.type == "message" and events[-1].response.output_text == "no {call}"
    kinds = [event.type.removeprefix("response.") for event in events[2:4]]
    assert kinds == ["output_item.added", "content_part.added"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "no {call}"
    assert [event.sequence_number for event in events] == [*range(len(events))]


async def test_a_call_that_is_cut_is_incomplete(text: Text) -> None:
    events = await called(text, ONE_CALL[:4], is_cut=True, tools=[ADD])
    assert events[-1].type == "response.incomplete"
    (call,) = events[-1].response.output
    assert (call.arguments, call.status) == (ONE_CALL[:4], "incomplete")


async def test_a_whole_call_is_completed_where_the_next_one_is_cut(text: Text) -> None:
    for end in (', {"na', "", ', {"name":"add","arguments":{'):
        content = f"[{SEVERAL_CALLS.partition(', ')[0]}{end}"
        events = await called(text, content, True, tools=[ADD, FIND], parallel_tool_calls=True)
        response = events[-1].response
        assert response.status == "incomplete" and response.output[0].status == "completed"
        assert response.output[0].arguments == ARGUMENTS[0]
        assert [call.status for call in response.output[1:]] == ["incomplete"] * (len(end) > 9)
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert items == response.output


async def test_a_call_that_a_stop_string_cuts_is_incomplete(text: Text) -> None:
    events = await called(text, ONE_CALL[:5], True, tools=[ADD], stop=":")
    response = events[-1].response
    assert response.status == response.output[0].status == "incomplete"
    assert response.output[0].arguments == ONE_CALL[:4] and response.incomplete_details is None
    events = await called(text, "a:", True, tools=[ADD], tool_choice="auto", stop=":")
    assert events[-1].response.output_text == "a"
    assert events[-1].response.status == events[-1].response.output[0].status == "completed"


@pytest.mark.parametrize("tokens", [(CUT, REST, THE), (SPECIAL, THE), (SPECIAL,)])
async def test_scores_of_what_is_no_text_yet_are_kept(text: Text, tokens: Sequence[int]) -> None:
    expected, _ = await stream(text, tokens=tokens, **SCORES)
    events, _ = await stream(text, tokens=tokens, tools=[ADD], **SCORES)
    (message,) = events[-1].response.output
    assert [message] == expected[-1].response.output
    assert len(message.content[0].logprobs) == len(tokens)


def test_instructions_stand_before_as_many_items_as_there_may_be() -> None:
    items = [{"role": "user", "content": str(i)} for i in range(MAX_MESSAGES)]
    _, chat = parse_response(json.dumps({"input": items, "instructions": "sit"}).encode())
    assert chat.messages[0] == Message("system", "sit")
    assert [message.content for message in chat.messages[1:]] == [*map(str, range(MAX_MESSAGES))]
